import pytest
import torch

from specgrad import memory, optim
from specgrad.memory.updates import QUINTIC

TASK = memory.Task(num_items=5000, dim=32, alpha=1.5, seed=4)


def masks(task, update, **options):
    return memory.recovered(task, memory.one_step(task, update, **options))


@pytest.mark.parametrize("update", ["gd", "muon", "h_lambda", "newton", "whitened_muon"])
def test_recovery_after_one_step_does_not_depend_on_the_rate(update):
    expected = masks(TASK, update)
    assert expected.any()
    for lr in (1e-3, 50.0):
        assert torch.equal(masks(TASK, update, lr=lr), expected)


def test_newton_inverts_the_hessian_at_the_start():
    step = memory.one_step(TASK, "newton")
    torch.testing.assert_close(memory.hessian_product(TASK, step), memory.gradient(TASK), rtol=1e-8, atol=1e-12)


def test_newton_by_conjugate_gradients_inverts_the_hessian_elsewhere():
    weight = 2 * memory.one_step(TASK, "muon")
    G = memory.gradient(TASK, weight)
    step = memory.direction(TASK, "newton", G, TASK.frequencies, weight, cg_steps=200, cg_tolerance=1e-6)
    assert (memory.hessian_product(TASK, step, weight) - G).norm() <= 1e-6 * G.norm()


def test_newton_by_conjugate_gradients_says_when_it_was_stopped_early():
    weight = 2 * memory.one_step(TASK, "muon")
    G = memory.gradient(TASK, weight)
    with pytest.warns(UserWarning, match=r"Newton's equation was solved to a relative residual of .* in 1 products"):
        memory.direction(TASK, "newton", G, TASK.frequencies, weight, cg_steps=1, cg_tolerance=1e-6)


@pytest.mark.parametrize("update", ["newton", "whitened_muon"])
def test_newton_and_whitened_muon_do_not_see_anisotropy(update):
    expected = masks(TASK, update)
    for kappas in ({"kappa_v": 1.0}, {"kappa_u": 0.5, "kappa_v": 1.5}):
        skewed = memory.Task(5000, 32, 1.5, seed=4, **kappas)
        assert torch.equal(masks(skewed, update), expected)


def test_muon_loses_capacity_to_anisotropy():
    counts = [masks(memory.Task(5000, 64, 1.5, kappa_v=kappa), "muon").sum() for kappa in (0.0, 1.0, 2.0)]
    assert counts[0] > counts[1] > counts[2]


def test_spectral_updates_turn_with_the_gradient():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(32, 32, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    G = memory.gradient(TASK)
    for update, options in (("gd", {}), ("muon", {}), ("h_lambda", {"lam": 1e-3}), ("muon", {"method": "quintic"})):
        turned = memory.direction(TASK, update, left @ G @ right.T, TASK.frequencies, **options)
        expected = left @ memory.direction(TASK, update, G, TASK.frequencies, **options) @ right.T
        assert (turned - expected).norm() < 1e-7 * expected.norm()


def test_minibatch_muon_drops_null_directions():
    q = TASK.sample(20)
    seen = int(torch.count_nonzero(q))
    weight = memory.one_step(TASK, "muon", frequencies=q)
    values = torch.linalg.svdvals(weight)
    torch.testing.assert_close(values[:seen], torch.ones(seen, dtype=torch.float64))
    assert values[seen:].max() < 1e-10
    assert torch.equal(weight, memory.one_step(TASK, "muon", batch_size=20))


def test_every_polar_method_of_high_accuracy_recovers_the_same_items():
    expected = masks(TASK, "muon")
    for options in ({"method": "qdwh"}, {"method": "eigh", "mode": "strict"}):
        assert (masks(TASK, "muon", **options) != expected).sum() <= 1


def test_five_quintic_steps_are_not_the_polar_factor_and_ten_are_nearly():
    task = memory.Task(20_000, 256, 2.0, seed=1, dtype=torch.float32)
    G = memory.gradient(task)
    exact = masks(task, "muon").sum().item()
    five, ten = (masks(task, "muon", method="quintic", quintic_steps=steps).sum().item() for steps in (5, 10))
    assert 0.1 * exact < five < 0.35 * exact
    assert ten > 0.95 * exact
    assert memory.polar_shortfall(G, memory.quintic_polar(G)) > 0.5
    assert memory.polar_shortfall(G, memory.quintic_polar(G, 10)) < 0.1
    assert memory.polar_shortfall(G, memory.one_step(task, "muon")) == 0


def test_iterates_of_the_quintic_do_not_flatten_monotonically():
    grid = torch.linspace(1e-3, 1, 20_001, dtype=torch.float64).numpy()
    value = grid
    for step in range(1, 6):
        value = QUINTIC(value)
        ratio = value / grid
        grows = (ratio[1:] - ratio[:-1]).max()
        assert grows <= 0 if step == 1 else grows > 0


def test_small_resolutions_are_muon_and_large_ones_gradient_descent():
    assert torch.equal(masks(TASK, "h_lambda", lam=1e-12), masks(TASK, "muon"))
    assert torch.equal(masks(TASK, "h_lambda", lam=1e6), masks(TASK, "gd"))


def test_optimizers_of_specgrad_and_torch_are_updates():
    G = memory.gradient(TASK)
    step = memory.one_step(TASK, lambda w: torch.optim.SGD(w, lr=0.5))
    torch.testing.assert_close(step, 0.5 * G)
    step = memory.one_step(TASK, lambda w: optim.Muon(w, lr=1.0, mode="strict", weight_decay=0.0))
    torch.testing.assert_close(step, memory.one_step(TASK, "muon"), atol=1e-6, rtol=0)


def test_bad_updates_are_refused(unchecked_types):
    with pytest.raises(ValueError, match=r"`update` must be one of gd, muon, .*; got 'adam'"):
        memory.one_step(TASK, "adam")
    with pytest.raises(ValueError, match=r"takes `frequencies` or `batch_size`; got both"):
        memory.one_step(TASK, "gd", TASK.frequencies, 10)
    with pytest.raises(ValueError, match=r"needs M_v of full rank 32; this batch has \d+ distinct items and rank"):
        memory.one_step(TASK, "newton", batch_size=20, mode="solve")
    with pytest.raises(ValueError, match=r"`mode` of Newton must be one of auto, solve, pinv, damped; got 'cg'"):
        memory.one_step(TASK, "newton", mode="cg")
    measured = memory.Task.from_counts(range(1, 50), dim=4)
    with pytest.raises(ValueError, match=r"no default for measured frequencies"):
        memory.one_step(measured, "h_lambda")


def test_newton_handles_small_batches():
    for options in ({"mode": "pinv"}, {"mode": "damped"}, {}):
        assert masks(TASK, "newton", batch_size=20, **options).sum() > 0


def test_settings_of_another_update_are_refused():
    build = lambda w: torch.optim.SGD(w, lr=1.0)  # noqa: E731
    for update, options, message in (
        ("muon", {"lam": 0.1}, r"`lam` is no setting of update 'muon' \(it has: method, mode, quintic_steps\); got 0.1"),
        ("gd", {"method": "svd"}, r"`method` is no setting of update 'gd' \(it has: none\)"),
        (build, {"method": "svd"}, r"`method` is no setting of a built optimizer"),
        (
            "newton",
            {"damping": 0.1},
            r"`damping` of Newton must be finite and > 0, with `mode`='damped'; got 0.1 and 'auto'",
        ),
        ("newton", {"damping": -0.1, "mode": "damped"}, r"`damping` of Newton must be finite and > 0"),
        ("newton", {"cg_steps": 0}, r"`cg_steps` of Newton must be >= 1; got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            memory.one_step(TASK, update, **options)
        with pytest.raises(ValueError, match=message):
            memory.simulate(TASK, update, 1, **options)
    with pytest.raises(ValueError, match=r"`lam` is no setting of update 'muon'"):
        memory.simulate_thresholded(TASK, 1, lam=0.1)


def test_gradients_of_another_size_are_refused(unchecked_types):
    with pytest.raises(ValueError, match=r"`gradient` must have shape \(32, 32\); got \(3, 3\)"):
        memory.direction(TASK, "muon", torch.zeros(3, 3), TASK.frequencies)


@pytest.mark.parametrize("lr", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_that_are_not_positive_are_refused(lr):
    with pytest.raises(ValueError, match=r"`lr` of `memory.one_step` must be finite and > 0"):
        memory.one_step(TASK, lr=lr)


@pytest.mark.parametrize("update", ["gd", "muon", "h_lambda", "newton", "whitened_muon"])
def test_no_frequencies_give_no_step(update):
    assert not memory.one_step(TASK, update, torch.zeros(5000, dtype=torch.float64)).any()
