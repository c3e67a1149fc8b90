import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgrad.aim import Potential
from specgrad.aim.activations import activation_named
from specgrad.aim.losses import Automatic, SquaredDifference, SquaredSoftmax
from specgrad.aim.mehler import moments_by_series
from specgrad.aim.quadrature import moments_on_grid, square_root
from tests.aim.reference import AIM

CASES = {
    "h1": Potential("h1"),
    "h2": Potential("h2"),
    "h3": Potential("h3"),
    "tanh": Potential("tanh"),
    "sine": Potential(torch.sin),
    "softmax, 2 tokens": Potential("softmax", tokens=2),
    "softmax, correlated": Potential("softmax", tokens=2, covariance=[[1.0, 0.4], [0.4, 1.5]]),
    "softmax, 3 tokens": Potential("softmax", tokens=3, covariance=[[1.0, 0.4, 0.0], [0.4, 1.5, 0.2], [0.0, 0.2, 0.7]]),
    "tanh, correlated": Potential("tanh", tokens=2, covariance=[[1.0, 0.4], [0.4, 1.5]]),
    "two students": Potential("h2", signs=(1, 1, -1)),
}


def overlaps(indices, seed=0):
    factor = np.random.default_rng(seed).standard_normal((indices, indices + 1)) / (indices + 1) ** 0.5
    return 0.5 * factor @ factor.T


@pytest.mark.parametrize("case", AIM["gamma_values"], ids=lambda c: f"{c['act']}-{c['q'][0][1]}")
def test_value_and_gamma_equal_the_closed_forms(case):
    potential = Potential(case["act"])
    assert potential.value(case["q"]) == pytest.approx(case["Phi"], rel=1e-12)
    np.testing.assert_allclose(potential.gamma(case["q"]), case["Gamma"], rtol=1e-12, atol=1e-12)


def test_gamma_of_the_linear_loss_with_correlated_tokens():
    known = AIM["gamma_quadratic_C"]
    potential = Potential("h1", tokens=2, covariance=known["C"])
    np.testing.assert_allclose(potential.gamma([[0.4, 0.1], [0.1, 0.7]]), known["Gamma"], rtol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_the_hessian_route_and_the_autodiff_route_agree(name):
    potential = CASES[name]
    q = overlaps(potential.indices)
    np.testing.assert_allclose(potential.gamma(q), potential.gamma(q, "autodiff"), atol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_gamma_is_the_derivative_of_the_value_with_both_off_diagonal_entries_counted(name):
    potential = CASES[name]
    k = potential.indices
    q, h = overlaps(k), 1e-5
    gamma = potential.gamma(q)
    for i in range(k):
        for j in range(i, k):
            step = np.zeros((k, k))
            step[i, j] = step[j, i] = h
            slope = (potential.value(q + step) - potential.value(q - step)) / (2 * h)
            assert slope == pytest.approx(gamma[i, j] * (1 if i == j else 2), abs=1e-7)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=6, max_size=6), st.sampled_from(["h2", "h3"]))
def test_closed_forms_equal_quadrature(entries, name):
    factor = np.array(entries).reshape(2, 3)
    q = factor @ factor.T
    closed, grid = Potential(name), Potential(name)
    with_mean = grid.evaluate(q, mean=[0.0, 0.0])  # means switch the closed forms off
    assert with_mean.routes == (f"Hermite series {int(name[1]) + 1}",)
    np.testing.assert_allclose(with_mean.a + with_mean.b, closed.gamma(q), atol=1e-9)
    assert with_mean.value == pytest.approx(closed.value(q), abs=1e-9)


@pytest.mark.parametrize("correlation", [-1.0, -0.6, 0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("name", ["tanh", "logistic", "h3"])
def test_the_series_equals_the_product_grid(name, correlation):
    function = SquaredDifference(activation_named(name), (1, -1), 1.5)
    covariance = np.array([[0.9, correlation * (0.9 * 0.4) ** 0.5], [correlation * (0.9 * 0.4) ** 0.5, 0.4]])
    mean = np.array([0.3, -0.2])
    grid = moments_on_grid(function, mean, square_root(covariance), 192)
    series = moments_by_series(function, mean, covariance, 128)
    for part in ("value", "gradient", "hessian"):
        np.testing.assert_allclose(getattr(series, part), getattr(grid, part), atol=1e-9)


def test_the_series_of_a_constant_feature_is_the_value_there():
    function = SquaredDifference(activation_named("tanh"), (1, -1))
    found = moments_by_series(function, np.array([0.3, 0.1]), np.zeros((2, 2)), 32)
    value, gradient, hessian = function.derivatives(torch.tensor([[0.3, 0.1]], dtype=torch.float64))
    assert found.value == pytest.approx(float(value), rel=1e-12)
    np.testing.assert_allclose(found.gradient, gradient[0], rtol=1e-12)
    np.testing.assert_allclose(found.hessian, hessian[0], rtol=1e-12)


def test_the_series_keeps_its_accuracy_where_tanh_is_nearly_a_step():
    potential = Potential("tanh")
    q = np.array([[4.0, 2.5], [2.5, 3.0]])
    # Independent: the trapezoidal rule in two variables through a Cholesky factor.
    x = np.linspace(-9, 9, 721)
    weights = np.exp(-(x[:, None] ** 2 + x**2) / 2)
    root = np.linalg.cholesky(2 * q)
    z1, z2 = root[0, 0] * x[:, None] + 0 * x, root[1, 0] * x[:, None] + root[1, 1] * x
    value = ((np.tanh(z1) - np.tanh(z2)) ** 2 * weights).sum() / weights.sum()
    cross = -2 * ((1 - np.tanh(z1) ** 2) * (1 - np.tanh(z2) ** 2) * weights).sum() / weights.sum()
    assert potential.evaluate(q).routes[0].startswith("Hermite series")
    assert potential.value(q) == pytest.approx(value, rel=1e-8)
    assert potential.gamma(q)[0, 1] == pytest.approx(cross, rel=1e-8)


@pytest.mark.parametrize("tokens", [2, 3, 4])
@pytest.mark.parametrize("signs", [(1, -1), (1, 1, -1)])
def test_derivatives_of_a_softmax_row_are_those_of_automatic_differentiation(tokens, signs):
    by_hand = SquaredSoftmax(tokens, signs)
    y = torch.randn(50, (tokens - 1) * len(signs), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for found, known in zip(by_hand.derivatives(y), Automatic(by_hand.value).derivatives(y), strict=True):
        torch.testing.assert_close(found, known, rtol=0, atol=1e-14)
    rows = torch.cat([torch.zeros(50, 1, len(signs), dtype=torch.float64), y.reshape(50, tokens - 1, -1)], dim=1)
    known = (torch.softmax(rows, dim=1) @ y.new_tensor(signs)).square().sum(1)
    torch.testing.assert_close(by_hand.value(y), known, rtol=0, atol=1e-14)


def test_many_heads_need_no_sampling():
    potential = Potential("tanh", signs=(1, 1, 1, -1, -1, -1))
    q = overlaps(6)
    found = potential.evaluate(q)
    assert found.routes[0].startswith("Hermite series")
    step = np.zeros((6, 6))
    step[1, 4] = step[4, 1] = 1e-5
    slope = (potential.value(q + step) - potential.value(q - step)) / 2e-5
    assert slope == pytest.approx(2 * potential.gamma(q)[1, 4], abs=1e-8)


def test_any_loss_by_sampling_agrees_with_the_reduced_integral_within_its_error():
    q = [[0.5, 0.25], [0.25, 0.5]]
    sampled = Potential(loss=softmax_loss, tokens=2).evaluate(q)
    exact = Potential("softmax", tokens=2)
    assert sampled.routes == ("quasi-Monte-Carlo",)
    assert np.all(sampled.error > 0)
    assert np.all(np.abs(sampled.a + sampled.b - exact.gamma(q)) < 5 * sampled.error)
    assert abs(sampled.value - exact.value(q)) < 5 * sampled.value_error


def softmax_loss(scores):
    rows = torch.softmax(scores, dim=-2)
    return ((rows[..., 0] - rows[..., 1]) ** 2).sum((-1, -2))


def test_errors_of_sampling_cover_the_truth_as_often_as_they_say():
    q = np.array([[0.5, 0.25], [0.25, 0.5]])
    exact = Potential("softmax", tokens=2)
    deviations = []
    for seed in range(12):
        found = Potential(loss=softmax_loss, tokens=2, seed=seed).evaluate(q)
        gamma = (found.a + found.b - exact.gamma(q)) / found.error
        deviations.append([(found.value - exact.value(q)) / found.value_error, *gamma[np.triu_indices(2)]])
    # Eight randomisations: Student's t with seven degrees of freedom, a root mean square of 1.2 and 95 % below 2.36. The
    # error of Gamma adds those of the Hessian's entries, which is on the safe side.
    size = np.sqrt(np.mean(np.square(deviations), axis=0))
    assert (size < 1.8).all()
    assert (size > 0.3).all()
    assert (np.abs(deviations) < 2.36).mean() > 0.88


def test_both_routes_agree_within_the_error_of_sampling_for_a_loss_of_many_scores():
    q = np.array([[0.5, 0.25], [0.25, 0.5]])
    potential = Potential(loss=softmax_loss, tokens=2)
    error = potential.evaluate(q).error
    assert np.all(np.abs(potential.gamma(q) - potential.gamma(q, "autodiff")) < 8 * error)
    with pytest.raises(ValueError, match="`q` must be positive definite for route='autodiff'"):
        potential.gamma(np.ones((2, 2)), "autodiff")


def test_a_loss_of_one_token_given_as_a_function_needs_no_sampling():
    potential = Potential(loss=lambda g: (torch.tanh(g[..., 0, 0, 0]) - torch.tanh(g[..., 0, 0, 1])) ** 2)
    q = overlaps(2)
    np.testing.assert_allclose(potential.gamma(q), Potential("tanh").gamma(q), atol=1e-8)


def test_gradients_in_psi_and_omega_and_in_the_mean_are_derivatives_of_the_value():
    potential = CASES["tanh, correlated"]
    psi, omega, mean, h = 0.3 * overlaps(2, 1), overlaps(2), np.array([0.3, -0.2]), 1e-5
    found = potential.evaluate(psi, omega, mean)
    step = np.array([[0.0, h], [h, 0.0]])
    slope = (potential.value(psi + step, omega, mean) - potential.value(psi - step, omega, mean)) / (4 * h)
    assert slope == pytest.approx(found.b[0, 1], abs=1e-7)
    slope = (potential.value(psi, omega + step, mean) - potential.value(psi, omega - step, mean)) / (4 * h)
    assert slope == pytest.approx(found.a[0, 1], abs=1e-7)
    for k in range(2):
        shift = h * np.eye(2)[k]
        slope = (potential.value(psi, omega, mean + shift) - potential.value(psi, omega, mean - shift)) / (2 * h)
        assert slope == pytest.approx(found.mean[k], abs=1e-7)


@pytest.mark.parametrize("kinked", [torch.relu, torch.abs, torch.sign, lambda z: torch.clamp(z, -1.5, 1.0)])
def test_losses_with_kinks_are_refused(kinked):
    with pytest.raises(ValueError, match="twice differentiable"):
        Potential(kinked).gamma(overlaps(2))


def test_losses_that_are_not_finite_or_random_are_refused_at_once():
    with pytest.raises(ValueError, match="must be finite for all scores"):
        Potential(loss=lambda g: g[..., 0, 0, 0].log() + g[..., 0, 0, 1] ** 2).gamma(overlaps(2))
    with pytest.raises(ValueError, match="twice differentiable"):
        Potential(loss=lambda g: g[..., 0, 0, 0] * torch.rand_like(g[..., 0, 0, 0]) + g[..., 0, 0, 1]).gamma(overlaps(2))


def test_steep_but_smooth_losses_are_accepted():
    steep = Potential(lambda z: torch.nn.functional.softplus(20 * z) / 20)
    assert np.isfinite(steep.gamma(overlaps(2))).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"covariance": [[1.0, 2.0], [2.0, 1.0]], "tokens": 2}, "`covariance` of `aim.Potential` must be symmetric and PSD"),
        ({"covariance": [[1.0, 0.0], [0.0, 1.0]]}, r"must have shape \(1, 1\)"),
        ({"activation": "softmax"}, "`tokens` of `aim` must be >= 2 for softmax"),
        ({"activation": np.tanh}, "`activation` of `aim` must be a name or an elementwise function of a tensor"),
        ({"activation": torch.sum}, "`activation` of `aim` must be a name or an elementwise function of a tensor"),
        ({"activation": "h4"}, "`activation` of `aim` must be one of h1"),
        ({"loss": "absolute"}, r"`loss` of `aim` must be 'squared' \(or 'mse'\) or a function"),
        ({"loss": lambda g: g}, "must map"),
        ({"loss": lambda g: g[..., 0, 0, 2], "tokens": 1}, "must accept scores of shape"),
        ({"tokens": 0}, "`tokens` of `aim.Potential` must be an integer >= 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Potential(**settings)


def test_order_parameters_of_the_wrong_shape_or_outside_the_cone_are_refused():
    with pytest.raises(ValueError, match=r"`q` of `aim.Potential` must have shape \(2, 2\)"):
        Potential("h2").value([[1.0]])
    with pytest.raises(ValueError, match=r"`mean` of `aim.Potential` must have shape \(2,\)"):
        Potential("tanh").value(np.eye(2), mean=[1.0])
    with pytest.raises(ValueError, match=r"`route` of `aim.Potential.gamma` must be one of hessian, autodiff"):
        Potential("tanh").gamma(np.eye(2), "newton")
    with pytest.raises(ValueError, match="PSD covariance"):
        Potential("tanh").gamma([[1.0, 2.0], [2.0, 1.0]])
