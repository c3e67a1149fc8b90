"""Levels 2 and 3: where the quadratic model is exact they agree; everywhere they leave the model as it was."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specgrad import Probe, gpt
from specgrad.linalg import nuclear_rank, stable_rank
from specgrad.probe import Likelihood, audit, likelihood_of, measure_advantage, measure_gain
from specgrad.probe.likelihoods import binary_cross_entropy, cross_entropy, poisson, squared_error
from tests.reference_matrices import RANK, least_squares

TASK = gpt.Task(size="tiny", batch_size=8)


@pytest.fixture(scope="module")
def trained():
    """A tiny decoder after 150 steps, and a batch."""
    model = TASK.model()
    optimizer = gpt.Recipe("muon", 0.002, 0.005, steps=200).optimizer(model)
    for step in range(150):
        gpt.loss(model, TASK.batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    batch = TASK.batch(150)
    return model, batch[:, :-1], batch[:, 1:]


def regression(seed=0, n=200, k=12, m=7):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, k, generator=generator, dtype=torch.float64) + 0.7
    return x, torch.randn(n, m, generator=generator, dtype=torch.float64)


def linear(k=12, m=7):
    torch.manual_seed(0)
    return nn.Linear(k, m, bias=False).double()


def test_on_least_squares_prediction_and_line_search_are_the_closed_form():
    x, y = regression()
    model = linear()
    (predicted,) = measure_advantage(model, x, y, "mse", method="gauss_newton")
    (realised,) = measure_gain(model, x, y, "mse")
    g = torch.autograd.grad((model(x) - y).square().sum(), model.weight)[0]
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    p = u @ vh
    q = [(x @ d.mT).square().sum() for d in (g, p)]
    expected = ((g * p).sum() ** 2 / q[1] / ((g * g).sum() ** 2 / q[0])).item()
    assert predicted["advantage"] == pytest.approx(expected, rel=1e-8)
    assert realised["gain"] == pytest.approx(expected, rel=1e-3)
    assert predicted["rho_euclidean"] == pytest.approx(1, abs=1e-8)
    assert realised["decrease_spectral"] == pytest.approx(predicted["decrease_spectral"], rel=5e-3)
    # The condition puts two bounds in place of the true curvatures: ||G A||_F <= ||G||_F ||A||_op and its partner.
    ratio = nuclear_rank(g).item() / stable_rank(x).item()
    t_e = q[0] / (g.square().sum() * torch.linalg.matrix_norm(x, 2) ** 2)
    t_s = q[1] / x.square().sum()
    assert expected == pytest.approx((ratio * t_e / t_s).item(), rel=1e-9)


@pytest.mark.parametrize("case", RANK["least_squares_condition"]["cases"], ids=lambda case: case["name"])
def test_reference_problems_have_their_known_decreases(case):
    inputs, gradient = least_squares(case)
    a, g = torch.from_numpy(inputs), torch.from_numpy(gradient)
    # A model at zero weight whose gradient is the case's: targets -G (A A^T / n)^+ A would need an inverse; instead the
    # quadratic form is evaluated directly, as level 2 does on a linear model.
    n = a.shape[1]
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    decreases = []
    for step, d in ((case["step_gd"], g), (case["step_spec"], u @ vh)):
        decreases.append(float(step * (g * d).sum() - step**2 * (d @ a).square().sum() / (2 * n)))
    assert decreases[0] == pytest.approx(case["actual_gd"], rel=1e-6)
    assert decreases[1] == pytest.approx(case["actual_spec"], rel=1e-6)
    assert decreases[1] >= case["delta_spec"] * (1 - 1e-9)


def test_equal_singular_values_make_both_directions_one():
    x = torch.eye(6, dtype=torch.float64)
    model = linear(6, 6)
    with torch.no_grad():
        model.weight.zero_()
    (record,) = measure_advantage(model, x, x, "mse", draws=8)
    assert record["advantage"] == pytest.approx(1, rel=1e-9)
    assert record["log_error"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    "likelihood, outputs, targets",
    [
        (cross_entropy(), torch.randn(4, 3, 5, dtype=torch.float64), torch.randint(5, (4, 3))),
        (
            cross_entropy(torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])),
            torch.randn(6, 5, dtype=torch.float64),
            torch.randint(5, (6,)),
        ),
        (cross_entropy(), torch.randn(4, 5, 3, dtype=torch.float64), torch.randint(5, (4, 3))),
        (cross_entropy(shift=True), torch.randn(4, 6, 5, dtype=torch.float64), torch.randint(5, (4, 6))),
        (cross_entropy(), torch.randn(6, 5, dtype=torch.float64), torch.tensor([1, -100, 3, -100, 0, 2])),
        (squared_error(), torch.randn(6, 5, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)),
        (binary_cross_entropy(), torch.randn(6, 5, dtype=torch.float64), torch.rand(6, 5, dtype=torch.float64)),
        (poisson(), torch.randn(6, 5, dtype=torch.float64), torch.rand(6, 5, dtype=torch.float64)),
    ],
    ids=["softmax", "weighted", "class axis second", "shifted", "ignored", "regression", "binary", "poisson"],
)
def test_sampled_scores_have_mean_zero_and_the_hessian_at_the_outputs_as_covariance(likelihood, outputs, targets):
    z = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    hessian = torch.autograd.functional.hvp(lambda f: likelihood.loss(f, targets), outputs, z)[1]
    expected = (hessian * z).sum().item()
    assert likelihood.curvature(outputs, targets, z).item() == pytest.approx(expected, rel=1e-5)
    generator = torch.Generator().manual_seed(2)
    draws = torch.stack([(likelihood.score(outputs, targets, generator) * z).sum() for _ in range(6000)]).double()
    assert draws.mean().item() == pytest.approx(0, abs=5 * (expected / 6000) ** 0.5)
    spread = draws.square().std().item() / 6000**0.5
    assert draws.square().mean().item() == pytest.approx(expected, abs=5 * spread)


def test_the_mean_over_draws_converges_to_the_exact_curvature(trained):
    model, inputs, targets = trained
    names = "blocks.0.attention.value|blocks.1.mlp.down|head|embedding"
    sampled = measure_advantage(model, inputs, targets, draws=150, pattern=names)
    exact = measure_advantage(model, inputs, targets, method="gauss_newton", pattern=names)
    for got, true in zip(sampled, exact, strict=True):
        for side in ("euclidean", "spectral"):
            # Steps are slope over curvature; 1200 squares of a nearly Gaussian variable have an error of four per cent.
            assert got[f"step_{side}"] == pytest.approx(true[f"step_{side}"], rel=0.2)


def test_hooks_and_gradients_of_single_sequences_give_the_same_scores(trained, monkeypatch):
    from specgrad.probe import scores

    model, inputs, targets = trained
    fast = measure_advantage(model, inputs, targets, draws=3, chunk=1)
    monkeypatch.setattr(scores, "_hookable", lambda layer: False)
    slow = measure_advantage(model, inputs, targets, draws=3)
    # The check of the hooks takes no draw, so that both ways see the same labels when a pass holds one sequence.
    for a, b in zip(fast, slow, strict=True):
        assert a["layer"] == b["layer"]
        assert a["advantage"] == pytest.approx(b["advantage"], rel=1e-3)


def test_predictions_rank_the_blocks_as_line_searches_do(trained):
    model, inputs, targets = trained
    realised = measure_gain(model, inputs, targets)
    exact = audit(measure_advantage(model, inputs, targets, method="gauss_newton"), realised)
    sampled = audit(measure_advantage(model, inputs, targets, draws=64), realised)
    assert len(sampled.rows) == 14
    assert sampled.rank_correlation > 0.6
    assert sampled.factor_90 < 1.5
    assert exact.median_factor < 1.15


def test_advantage_does_not_depend_on_the_scale_of_the_loss(trained):
    model, inputs, targets = trained
    base = cross_entropy()
    scaled = Likelihood(
        "scaled", lambda f, y: 1000 * base.loss(f, y), base.units, lambda f, y, g: 1000**0.5 * base.score(f, y, g)
    )
    first, second = (measure_advantage(model, inputs, targets, loss, draws=2, pattern="mlp.up") for loss in (base, scaled))
    for a, b in zip(first, second, strict=True):
        assert a["advantage"] == pytest.approx(b["advantage"], rel=1e-4)
        assert 1000 * a["decrease_spectral"] == pytest.approx(b["decrease_spectral"], rel=1e-4)


def test_at_initialisation_the_gate_says_that_there_is_no_quadratic_regime():
    batch = TASK.batch(0)
    records = measure_advantage(TASK.model(), batch[:, :-1], batch[:, 1:], method="gauss_newton", pattern="blocks.0")
    refused = [record for record in records if "no quadratic regime" in record["reason"]]
    assert len(refused) >= len(records) // 2
    assert all(math.isnan(record["advantage"]) for record in refused)


def test_models_without_forward_mode_fall_back_on_differences(trained, monkeypatch):
    from specgrad.probe import gauss_newton

    model, inputs, targets = trained
    exact = measure_advantage(model, inputs, targets, method="gauss_newton", pattern="1.mlp")

    def refuse(*arguments):
        raise NotImplementedError

    monkeypatch.setattr(gauss_newton, "_forward_mode", refuse)
    differences = measure_advantage(model, inputs, targets, method="gauss_newton", pattern="1.mlp")
    for a, b in zip(exact, differences, strict=True):
        assert b["method"] == "gauss_newton, differences"
        assert a["step_spectral"] == pytest.approx(b["step_spectral"], rel=1e-2)
        assert a["rho_euclidean"] == pytest.approx(b["rho_euclidean"], rel=5e-2)


class Everything(nn.Module):
    """Batch statistics, dropout, a tied head, fused attention, a strided convolution: all that can go wrong."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 8, max_norm=1.0)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.batch = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.batch(self.convolution(x.mT)).mT
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.norm(self.dropout(x)))


@pytest.mark.parametrize("measure", [measure_advantage, measure_gain])
def test_measuring_leaves_weights_gradients_buffers_modes_and_random_numbers_as_they_were(measure):
    torch.manual_seed(0)
    model = Everything()
    ids = torch.randint(9, (6, 5))
    model(ids[:, :1]).square().mean().backward()
    model.attention.eval()
    before = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    grads = [p.grad.clone() for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    random = torch.get_rng_state()
    records = measure(model, ids, ids, gains=True)
    assert {r["layer"] for r in records} >= {"embedding+head", "convolution", "attention.in_proj_weight[key]", "norm"}
    assert all(torch.equal(a, b) for a, b in zip(before, (*model.parameters(), *model.buffers()), strict=True))
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_every_kind_of_weight_agrees_with_exact_curvature():
    torch.manual_seed(0)
    model = Everything().double()
    ids = torch.randint(9, (6, 5))
    sampled = measure_advantage(model, ids, ids, draws=600)
    for record in sampled:
        assert record["reason"] == ""
        assert record["log_error"] < 0.1
    exact = {r["layer"]: r for r in measure_advantage(model, ids, ids, method="gauss_newton")}
    for record in sampled:
        for side in ("euclidean", "spectral"):
            assert record[f"step_{side}"] == pytest.approx(exact[record["layer"]][f"step_{side}"], rel=0.15), record["layer"]


def test_weights_used_outside_their_modules_are_noticed_and_measured_all_the_same():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6, bias=False)
            self.outer = nn.Linear(6, 4, bias=False)

        def forward(self, x):
            return self.outer(self.inner(x) + F.linear(x.square(), self.inner.weight))

    torch.manual_seed(0)
    model = Functional().double()
    x, y = torch.randn(40, 6, dtype=torch.float64), torch.randn(40, 4, dtype=torch.float64)
    sampled = measure_advantage(model, x, y, "mse", draws=60)
    exact = measure_advantage(model, x, y, "mse", method="gauss_newton")
    for got, true in zip(sampled, exact, strict=True):
        assert got["advantage"] == pytest.approx(true["advantage"], rel=0.15)


def test_one_pass_or_several_give_the_same_curvature(trained):
    model, inputs, targets = trained
    whole, parts = (measure_advantage(model, inputs, targets, draws=100, chunk=chunk) for chunk in (8, 3))
    for a, b in zip(whole, parts, strict=True):
        assert a["sequences"] == b["sequences"] == 8
        assert a["decrease_spectral"] * a["advantage"] > 0
        assert a["step_spectral"] == pytest.approx(b["step_spectral"], rel=0.25)


def test_measuring_between_steps_adds_nothing_to_the_step_in_progress():
    x, y = regression()
    model = linear()
    with Probe(model, every=1) as probe:
        F.mse_loss(model(x), y).backward()
        probe.measure_advantage(x, y, "mse")
        (record,) = probe.step()
    assert record["tokens"] == 200


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), F.cross_entropy, "cross_entropy", nn.CrossEntropyLoss(label_smoothing=0.1)]
)
def test_losses_are_recognised(loss):
    assert likelihood_of(loss).name == "cross entropy"


@pytest.mark.parametrize(
    "loss", [nn.L1Loss(), nn.HuberLoss(), lambda f, y: (f - y).abs().sum(), "hinge", nn.MSELoss(reduction="none")]
)
def test_losses_without_a_sampler_are_refused_with_the_way_out(loss):
    x, y = regression()
    with pytest.raises(ValueError, match=r"Likelihood.*with your own sampler"):
        measure_advantage(linear(), x, y, loss)


def test_bad_requests_are_refused_by_name():
    x, y = regression()
    with pytest.raises(ValueError, match=r"`method` of `measure_advantage` must be fisher or gauss_newton; got 'hessian'"):
        measure_advantage(linear(), x, y, "mse", method="hessian")
    with pytest.raises(ValueError, match=r"`draws`.*got 0"):
        measure_advantage(linear(), x, y, "mse", draws=0)
    with pytest.raises(ValueError, match=r"`pattern` must match"):
        measure_gain(linear(), x, y, "mse", pattern="mlp")
    with pytest.raises(ValueError, match=r"`targets` must hold a class"):
        measure_gain(linear(), x, torch.zeros(200, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"`targets` must have the shape of the outputs; got \(7, 200\) for \(200, 7\)"):
        measure_advantage(linear(), x, y.T, "mse")
    with pytest.raises(ValueError, match=r"`targets` of a cross entropy must be integer classes; got torch.float64"):
        measure_advantage(linear(), x, y[:, 0])
    with pytest.raises(ValueError, match=r"`targets` must hold at least one sequence"):
        measure_gain(linear(), x[:0], y[:0], "mse")
    with pytest.raises(ValueError, match=r"at least one that the loss counts"):
        measure_advantage(linear(), x, torch.full((200,), -100))
    with pytest.raises(ValueError, match=r"`chunk` must be an integer >= 1; got 0"):
        measure_gain(linear(), x, y, "mse", chunk=0)
    only = Likelihood("mine", squared_error().loss, squared_error().units, squared_error().score)
    with pytest.raises(ValueError, match=r"mine can only be sampled"):
        measure_advantage(linear(), x, y, only, method="gauss_newton")


def test_a_zero_gradient_has_no_advantage_and_says_so():
    model = linear()
    x = torch.zeros(8, 12, dtype=torch.float64)
    (record,) = measure_advantage(model, x, torch.zeros(8, 7, dtype=torch.float64), "mse")
    assert math.isnan(record["advantage"])
    assert "gradient is zero" in record["reason"]
