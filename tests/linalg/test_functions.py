import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from specgrad.linalg.exact import polar_svd
from specgrad.linalg.functions import h_lambda, h_lambda_derivative, signal_derivative, spectral_function

F64 = torch.float64
QUINTIC = (3.4445, -4.7750, 2.0315)

# Population gradients of associative memories: size of the gradient and of its images under the update maps.
MEMORY = [
    {
        "N": 5000,
        "d": 32,
        "alpha": 1.25,
        "gradient": 0.29906524155185943,
        "hlam": 3.1095446983628467,
        "ns5": 5.195435836334961,
    },
    {"N": 20000, "d": 64, "alpha": 1.5, "gradient": 0.4837546607845417, "hlam": 5.2196077516625845},
    {"N": 20000, "d": 128, "alpha": 1.5, "gradient": 0.4691075746848759, "hlam": 7.450873290553342},
]

# Slope of the signal of one item (counted from 0) against the gradient of all others.
SIGNAL = [{"item": 5, "slope": 56.67837083013865}, {"item": 40, "slope": 76.23165712494352}]


def memory(num_items, dim, alpha, seed):
    frequencies = np.arange(1, num_items + 1.0) ** -alpha
    embeddings = (np.random.default_rng([seed, side]).standard_normal((num_items, dim)) / np.sqrt(dim) for side in (0, 1))
    return frequencies / frequencies.sum(), *embeddings


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def with_values(rows, cols, values, seed=0):
    """A matrix with prescribed singular values and its singular vectors."""
    left, _ = torch.linalg.qr(gaussian(rows, rows, seed=seed))
    right, _ = torch.linalg.qr(gaussian(cols, cols, seed=seed + 1))
    values = torch.as_tensor(values, dtype=F64)
    left, right = left[:, : len(values)], right[:, : len(values)]
    return (left * values) @ right.mT, left, right


def damped(s, lam):
    return s / torch.sqrt(s * s + lam * lam)


def slope_of(function, matrix, u, v, step):
    """Fourth-order central difference of the signal."""

    def signal(q):
        return u @ function(matrix + q * torch.outer(u, v)) @ v

    return (8 * (signal(step) - signal(-step)) - (signal(2 * step) - signal(-2 * step))) / (12 * step)


def spectral_error(got, expected):
    return torch.linalg.matrix_norm(got.double() - expected, 2).item()


# Known answers


@pytest.mark.parametrize("case", MEMORY, ids=lambda case: f"d={case['d']}")
def test_images_of_memory_gradients_have_the_known_size(case):
    frequencies, u, v = memory(case["N"], case["d"], case["alpha"], seed=2026)
    gradient = torch.from_numpy((frequencies[:, None] * u).T @ v - np.outer(u.mean(0), v.T @ frequencies))
    assert torch.linalg.norm(gradient).item() == pytest.approx(case["gradient"], rel=1e-12)
    image = h_lambda(gradient, lam=case["d"] ** -case["alpha"])
    assert torch.linalg.norm(image).item() == pytest.approx(case["hlam"], rel=1e-11)
    assert torch.linalg.norm(h_lambda(gradient, lam=0.0)).item() == pytest.approx(case["d"] ** 0.5, rel=1e-12)
    if "ns5" in case:
        step = gradient / torch.linalg.norm(gradient)
        for _ in range(5):
            step = spectral_function(step, QUINTIC)
        assert torch.linalg.norm(step).item() == pytest.approx(case["ns5"], rel=1e-11)


@pytest.mark.parametrize("case", SIGNAL, ids=lambda case: f"item {case['item']}")
def test_slope_of_the_signal_of_a_memory_item_is_the_known_one(case):
    frequencies, u, v = memory(num_items=500, dim=24, alpha=1.5, seed=7)
    frequencies[case["item"]] = 0
    others = torch.from_numpy((frequencies[:, None] * u).T @ v)
    pair = torch.from_numpy(u[case["item"]]), torch.from_numpy(v[case["item"]])
    assert h_lambda_derivative(others, *pair, lam=0.01).item() == pytest.approx(case["slope"], rel=1e-11)
    general = signal_derivative(others, *pair, lambda s: damped(s, 0.01), lambda s: 1e-4 / (s * s + 1e-4) ** 1.5)
    assert general.item() == pytest.approx(case["slope"], rel=1e-11)
    assert slope_of(lambda g: h_lambda(g, 0.01), others, *pair, step=1e-4).item() == pytest.approx(case["slope"], rel=1e-6)


# h_lambda


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6, 1e8])
@pytest.mark.parametrize("lam", [1.0, 1e-2, 1e-4, 1e-6, 1e-8])
def test_h_lambda_is_exact_up_to_the_rounding_of_the_matrix_divided_by_the_resolution(condition, lam):
    values = torch.logspace(0, -np.log10(condition), 16, dtype=F64)
    matrix, left, right = with_values(16, 24, values)
    bound = 50 * torch.finfo(F64).eps * (1 + 1 / max(lam, 1 / condition))
    assert spectral_error(h_lambda(matrix, lam), (left * damped(values, lam)) @ right.mT) <= bound


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 9), cols=st.integers(1, 9), seed=st.integers(0, 10**6), lam=st.sampled_from([0.0, 1e-3, 0.5, 20.0])
)
def test_singular_values_go_through_the_scalar_function_and_keep_their_order(rows, cols, seed, lam):
    matrix = gaussian(rows, cols, seed=seed)
    got = torch.linalg.svdvals(h_lambda(matrix, lam))
    torch.testing.assert_close(got, damped(torch.linalg.svdvals(matrix), lam), atol=1e-11, rtol=0)
    larger = torch.linalg.svdvals(h_lambda(matrix, 2 * lam))
    assert (larger <= got + 1e-12).all()
    assert got.max() <= 1 + 1e-12


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 9), cols=st.integers(1, 9), seed=st.integers(0, 10**6), lam=st.floats(1e-3, 10))
def test_spectral_functions_are_odd_and_turn_with_rotations_of_both_sides(rows, cols, seed, lam):
    matrix = gaussian(rows, cols, seed=seed)
    left, _ = torch.linalg.qr(gaussian(rows, rows, seed=seed + 1))
    right, _ = torch.linalg.qr(gaussian(cols, cols, seed=seed + 2))
    for apply in (
        lambda g: h_lambda(g, lam),
        lambda g: spectral_function(g / torch.linalg.norm(matrix), QUINTIC),
        lambda g: spectral_function(g, torch.tanh),
    ):
        torch.testing.assert_close(apply(left @ matrix @ right), left @ apply(matrix) @ right, atol=1e-10, rtol=0)
        torch.testing.assert_close(apply(-matrix), -apply(matrix), atol=1e-12, rtol=0)
        torch.testing.assert_close(apply(matrix.mT), apply(matrix).mT, atol=1e-10, rtol=0)


@pytest.mark.parametrize("shape", [(12, 12), (5, 30), (30, 5)])
def test_h_lambda_tends_to_the_polar_factor_quadratically_as_the_resolution_vanishes(shape):
    matrix = gaussian(*shape)
    smallest = torch.linalg.svdvals(matrix)[-1]
    for lam in (1e-2, 1e-4, 1e-6):
        assert spectral_error(h_lambda(matrix, lam), polar_svd(matrix)) <= 0.5 * (lam / smallest) ** 2 + 1e-12


@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_resolution_zero_gives_the_partial_isometry_of_a_rank_deficient_matrix(dtype):
    low = (gaussian(9, 3) @ gaussian(3, 14, seed=1)).to(dtype)
    torch.testing.assert_close(h_lambda(low, 0.0), polar_svd(low), atol=1e-15, rtol=0)
    values = torch.linalg.svdvals(h_lambda(low, 0.0).double())
    assert (values > 0.5).sum() == 3 and values[3] < 1e-6


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_scaling_the_matrix_and_the_resolution_together_changes_nothing(scale):
    matrix = gaussian(6, 8)
    torch.testing.assert_close(h_lambda(matrix * scale, 0.3 * scale), h_lambda(matrix, 0.3), atol=1e-13, rtol=0)


def test_a_tensor_of_resolutions_sweeps_one_matrix_or_pairs_with_a_batch():
    matrices, lams = gaussian(3, 4, 6), torch.tensor([0.0, 0.1, 2.0], dtype=F64)
    swept, paired = h_lambda(matrices[0], lams), h_lambda(matrices, lams)
    crossed = h_lambda(matrices, lams[:, None])
    assert crossed.shape == (3, 3, 4, 6)
    for i, lam in enumerate(lams.tolist()):
        torch.testing.assert_close(swept[i], h_lambda(matrices[0], lam))
        torch.testing.assert_close(paired[i], h_lambda(matrices[i], lam))
        torch.testing.assert_close(crossed[i], h_lambda(matrices, lam))


# Spectral functions in general


@pytest.mark.parametrize("shape", [(7, 7), (4, 11), (11, 4), (2, 3, 5, 8)])
@pytest.mark.parametrize("coefficients", [(2.0,), (1.5, -0.5), QUINTIC, (35 / 16, -35 / 16, 21 / 16, -5 / 16)])
def test_a_polynomial_by_products_equals_the_polynomial_of_the_singular_values(shape, coefficients):
    matrix = gaussian(*shape) / 4

    def polynomial(s):
        return sum(c * s ** (2 * i + 1) for i, c in enumerate(coefficients))

    torch.testing.assert_close(
        spectral_function(matrix, coefficients), spectral_function(matrix, polynomial), atol=1e-12, rtol=1e-12
    )


def test_a_function_that_is_not_zero_at_zero_leaves_null_directions_at_zero():
    low, left, right = with_values(8, 6, [3.0, 0.5])
    torch.testing.assert_close(spectral_function(low, torch.ones_like), left @ right.mT, atol=1e-12, rtol=0)
    torch.testing.assert_close(
        spectral_function(low, lambda s: 1 / s), torch.linalg.pinv(low).mT.contiguous(), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize(
    "apply",
    [
        lambda g: h_lambda(g, 0.1),
        lambda g: h_lambda(g, 0.0),
        lambda g: spectral_function(g, torch.sqrt),
        lambda g: spectral_function(g, torch.ones_like),
        lambda g: spectral_function(g, QUINTIC),
    ],
    ids=["h_lambda", "polar", "callable", "sign", "polynomial"],
)
class TestEverySpectralFunction:
    def test_maps_zero_to_exact_zero_and_non_finite_to_nan_without_touching_the_batch(self, apply):
        batch = gaussian(4, 5, 7)
        alone = apply(batch)
        batch[1], batch[2, 0, 0], batch[3, 4, 6] = 0, torch.inf, torch.nan
        got = apply(batch)
        torch.testing.assert_close(got[0], alone[0], atol=1e-13, rtol=1e-13)
        assert torch.equal(got[1], torch.zeros(5, 7, dtype=F64))
        assert got[2:].isnan().all()

    @pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16])
    def test_computes_in_float64_and_returns_the_dtype_of_the_input_unwritten(self, apply, dtype):
        matrix = gaussian(8, 5).to(dtype)
        before = matrix.clone()
        got = apply(matrix)
        assert got.dtype == dtype and torch.equal(matrix, before)
        torch.testing.assert_close(got, apply(matrix.double()).to(dtype))

    @pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 4, 4), (2, 0, 3)])
    def test_returns_empty_matrices_and_batches_empty(self, apply, shape):
        assert apply(torch.empty(*shape)).shape == shape


# Derivative of the signal


def composed(s):
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


def composed_derivative(s):
    slope = torch.ones_like(s)
    for _ in range(5):
        slope = slope * (3.4445 - 3 * 4.7750 * s**2 + 5 * 2.0315 * s**4)
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return slope


SMOOTH = {
    "cube": (lambda s: s**3, lambda s: 3 * s**2),
    "tanh": (torch.tanh, lambda s: 1 / torch.cosh(s) ** 2),
    "damped": (lambda s: damped(s, 0.3), lambda s: 0.09 / (s * s + 0.09) ** 1.5),
}
SPECTRA = {
    "distinct": [2.0, 1.1, 0.6, 0.2],
    "coinciding": [1.3, 1.3, 0.4, 0.4],
    "nearly coinciding": [1.3, 1.3 + 1e-9, 0.4, 0.4004],
    "rank deficient": [1.3, 0.4, 0.0, 0.0],
    "zero": [0.0, 0.0, 0.0, 0.0],
}


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(4, 4), (4, 9), (9, 4)])
@pytest.mark.parametrize("name", SMOOTH)
def test_slope_agrees_with_finite_differences_whatever_the_spectrum_and_shape(name, shape, spectrum):
    matrix, _, _ = with_values(*shape, SPECTRA[spectrum])
    u, v = gaussian(shape[0], seed=5), gaussian(shape[1], seed=6)
    function, derivative = SMOOTH[name]
    expected = slope_of(lambda g: spectral_function(g, function), matrix, u, v, step=2e-4)
    got = signal_derivative(matrix, u, v, function, derivative)
    torch.testing.assert_close(got, expected, atol=1e-8, rtol=1e-8)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 7),
    cols=st.integers(1, 7),
    seed=st.integers(0, 10**6),
    lam=st.floats(0.01, 10),
    spread=st.sampled_from([0.0, 1e-12, 1e-6, 1e-3, 1.0]),
)
def test_closed_form_for_h_lambda_equals_the_general_formula_and_stays_between_zero_and_its_bound(
    rows, cols, seed, lam, spread
):
    base, _, _ = with_values(rows, cols, torch.ones(min(rows, cols)), seed=seed)
    matrix = base + spread * gaussian(rows, cols, seed=seed + 2)
    u, v = gaussian(rows, seed=seed + 3), gaussian(cols, seed=seed + 4)
    got = h_lambda_derivative(matrix, u, v, lam)
    general = signal_derivative(matrix, u, v, lambda s: damped(s, lam), lambda s: lam**2 / (s * s + lam**2) ** 1.5)
    torch.testing.assert_close(got, general, rtol=1e-9, atol=1e-11)
    assert 0 <= got <= (u @ u) * (v @ v) / lam * (1 + 1e-12)


@pytest.mark.parametrize("gap", [1e-14, 1e-9, 1e-5, 5e-4, 9.9e-4, 1.01e-3, 0.1])
def test_divided_differences_of_five_composed_quintics_keep_eleven_digits_at_every_gap(gap):
    s = torch.tensor([0.9, 0.9 * (1 - gap)], dtype=F64)
    # With u = v = (1, 1) only the divided difference and the two derivatives are left; Simpson's rule on a fine
    # grid is the reference for the quotient.
    grid = torch.linspace(s[1].item(), s[0].item(), 20001, dtype=F64)
    weights = torch.ones_like(grid)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    quotient = (weights * composed_derivative(grid)).sum() / 60000
    both = torch.ones(2, dtype=F64)
    got = signal_derivative(torch.diag(s), both, both, composed, composed_derivative)
    scale = composed_derivative(s).abs().max() + 1
    assert (got - (2 * quotient + composed_derivative(s).sum())).abs() <= 1e-11 * scale


def test_slope_of_the_cube_is_the_product_rule():
    matrix, u, v = gaussian(5, 8), gaussian(5, seed=1), gaussian(8, seed=2)
    left, right, across = matrix @ matrix.mT, matrix.mT @ matrix, u @ matrix @ v
    expected = (u @ left @ u) * (v @ v) + (u @ u) * (v @ right @ v) + across * across
    got = signal_derivative(matrix, u, v, lambda s: s**3, lambda s: 3 * s**2)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


def test_along_a_singular_pair_the_slope_is_the_scalar_derivative_even_when_it_is_tiny():
    values = torch.tensor([1.0, 0.5, 1e-3], dtype=F64)
    got = h_lambda_derivative(torch.diag(values), torch.eye(3, dtype=F64), torch.eye(3, dtype=F64), lam=1e-6)
    torch.testing.assert_close(got, 1e-12 / (values.square() + 1e-12) ** 1.5, rtol=1e-12, atol=0)


def test_slope_at_another_coefficient_is_the_slope_at_zero_of_the_moved_matrix():
    matrix, u, v = gaussian(6, 6), gaussian(6, seed=1), gaussian(6, seed=2)
    moved = matrix + 0.7 * torch.outer(u, v)
    expected = slope_of(lambda g: h_lambda(g, 0.2), moved, u, v, step=1e-3)
    torch.testing.assert_close(h_lambda_derivative(moved, u, v, 0.2), expected, rtol=1e-7, atol=1e-9)


def test_at_resolution_zero_the_slope_is_that_of_the_polar_factor_and_infinite_where_it_jumps():
    u, v = gaussian(4, seed=1), gaussian(6, seed=2)
    regular, _, _ = with_values(4, 6, [2.0, 1.0, 1.0, 0.5])
    expected = slope_of(polar_svd, regular, u, v, step=1e-3)
    torch.testing.assert_close(h_lambda_derivative(regular, u, v, 0.0), expected, rtol=1e-8, atol=1e-9)
    deficient, _, _ = with_values(4, 6, [2.0, 1.0])
    got = h_lambda_derivative(torch.stack([deficient, torch.zeros(4, 6, dtype=F64), regular]), u, v, 0.0)
    assert got[:2].tolist() == [torch.inf, torch.inf] and got[2].isfinite()


def test_many_pairs_and_many_matrices_broadcast_and_equal_the_loop():
    matrices, u, v = gaussian(3, 4, 6), gaussian(5, 1, 4, seed=1), gaussian(5, 3, 6, seed=2)
    lams = torch.tensor([0.1, 0.2, 0.3], dtype=F64)
    got = h_lambda_derivative(matrices, u, v, lams)
    assert got.shape == (5, 3) and got.dtype == F64
    general = signal_derivative(matrices, u, v, *SMOOTH["tanh"])
    for pair in range(5):
        for i in range(3):
            arguments = matrices[i], u[pair, 0], v[pair, i]
            torch.testing.assert_close(got[pair, i], h_lambda_derivative(*arguments, lams[i].item()))
            torch.testing.assert_close(general[pair, i], signal_derivative(*arguments, *SMOOTH["tanh"]))


def test_slope_is_nan_only_where_the_matrix_or_a_vector_is_not_finite_and_empty_sums_are_zero():
    matrices, u, v = gaussian(4, 3, 5), gaussian(4, 3, seed=1), gaussian(4, 5, seed=2)
    alone = h_lambda_derivative(matrices, u, v, 0.1)
    matrices[1, 0, 0], u[2, 1], v[3, 4] = torch.inf, torch.nan, torch.inf
    for got in (h_lambda_derivative(matrices, u, v, 0.1), signal_derivative(matrices, u, v, *SMOOTH["damped"])):
        assert got.isnan().tolist() == [False, True, True, True]
    torch.testing.assert_close(h_lambda_derivative(matrices, u, v, 0.1)[0], alone[0])
    assert h_lambda_derivative(matrices, u, v, 0.0).isnan().tolist() == [False, True, True, True]
    empty = torch.empty(2, 0, 3), torch.empty(0), torch.ones(3)
    assert h_lambda_derivative(*empty, 0.1).tolist() == signal_derivative(*empty, *SMOOTH["cube"]).tolist() == [0.0, 0.0]


# Refusals

EYE, ONES = torch.eye(2), torch.ones(2)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: h_lambda(ONES, 1.0), ValueError, "`matrix` of `h_lambda`.*at least two axes.*\\(2,\\)"),
        (lambda: h_lambda(EYE.int(), 1.0), TypeError, "`matrix` of `h_lambda`.*real floating dtype.*int32"),
        (lambda: h_lambda(EYE.to(torch.complex64), 1.0), TypeError, "real floating dtype.*complex64"),
        (lambda: h_lambda(EYE, -1.0), ValueError, "`lam` of `h_lambda`.*>= 0.*-1.0"),
        (lambda: h_lambda(EYE, float("nan")), ValueError, "`lam` of `h_lambda`.*finite.*nan"),
        (
            lambda: h_lambda(torch.ones(3, 2, 2), torch.ones(2)),
            ValueError,
            "`h_lambda`.*broadcast.*matrix \\(3,\\), lam \\(2,\\)",
        ),
        (lambda: spectral_function(ONES, torch.tanh), ValueError, "`matrix` of `spectral_function`.*two axes"),
        (lambda: spectral_function(EYE, 3), TypeError, "`function`.*callable or a sequence.*int"),
        (lambda: spectral_function(EYE, "tanh"), TypeError, "`function`.*callable or a sequence.*str"),
        (lambda: spectral_function(EYE, ()), ValueError, "`function`.*at least one coefficient"),
        (lambda: spectral_function(EYE, torch.sum), ValueError, "`function`.*shape it is given, \\(2,\\); got \\(\\)"),
        (lambda: signal_derivative(EYE, ONES, ONES, torch.tanh, lambda s: 1), ValueError, "`derivative`.*got int"),
        (
            lambda: signal_derivative(EYE, torch.ones(3), ONES, torch.tanh, torch.tanh),
            ValueError,
            "`u`.*per row.*2.*\\(3,\\)",
        ),
        (lambda: h_lambda_derivative(EYE, ONES, torch.ones(3), 1.0), ValueError, "`v`.*per column.*2.*\\(3,\\)"),
        (lambda: h_lambda_derivative(EYE, ONES.int(), ONES, 1.0), TypeError, "`u`.*real floating dtype.*int32"),
        (lambda: h_lambda_derivative(EYE, ONES, ONES, -0.5), ValueError, "`lam` of `h_lambda_derivative`.*-0.5"),
        (
            lambda: h_lambda_derivative(EYE, torch.ones(3, 2), torch.ones(4, 2), 1.0),
            ValueError,
            "broadcast.*u \\(3,\\), v \\(4,\\)",
        ),
    ],
)
def test_bad_input_is_refused_with_the_argument_and_what_it_got(unchecked_types, call, error, message):
    with pytest.raises(error, match=message):
        call()
