import warnings

import numpy as np
import pytest
import torch

from specgrad import memory, optim
from specgrad.memory import theory

TASK = memory.Task(num_items=3000, dim=32, alpha=1.5, seed=5)


def test_the_line_search_finds_the_best_rate_of_a_fine_grid():
    W = memory.one_step(TASK, "muon", lr=2 * 32**0.5)
    along = memory.direction(TASK, "muon", memory.gradient(TASK, W), TASK.frequencies, W)
    rate = memory.line_search(TASK, W, along, TASK.frequencies)
    rates = rate * torch.tensor([0.7, 0.9, 1.0, 1.1, 1.4], dtype=torch.float64)
    losses = [memory.loss(TASK, W + r * along) for r in rates]
    assert min(losses) == losses[2]


def test_newton_takes_the_best_rate_also_where_the_loss_is_flat():
    task = memory.Task(2000, 32, 1.5, seed=1)
    run = memory.simulate(task, "newton", 4, with_loss=True, cg_steps=30, cg_tolerance=0.3)
    before, after = run.weights[2], run.weights[3]
    losses = [memory.loss(task, before + factor * (after - before)) for factor in (0.8, 1.0, 1.25)]
    assert min(losses) == losses[1]


def test_late_steps_do_not_stall_on_the_error_of_approximate_losses():
    task = memory.Task(600, 16, 1.5)
    losses = memory.simulate(task, "gd", 40, with_loss=True).column("loss")
    assert losses == sorted(losses, reverse=True)
    # The searches that take the mean field for all but d rows stop at 1.654.
    assert losses[-1] < 1.648


def test_a_weight_that_overflows_is_named():
    task = memory.Task(600, 16, 1.5, dtype=torch.float32)
    with pytest.raises(FloatingPointError, match=r"not finite in torch.float32 after step 1; lower `lr`"):
        memory.simulate(task, "muon", 3, 1e39)


def test_every_line_searched_step_lowers_the_loss_and_stores_more():
    for update in ("muon", "newton", "gd", "whitened_muon"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            options = {"cg_steps": 5} if update == "newton" else {}
            run = memory.simulate(TASK, update, steps=3, with_loss=True, **options)
        losses = run.column("loss")
        assert losses == sorted(losses, reverse=True)
        assert run.column("batch_loss")[1:] == losses[:-1]
        assert run.records[-1]["accuracy"] > run.records[0]["accuracy"]


def test_momentum_and_decay_are_what_they_say():
    run = memory.simulate(TASK, "gd", 3, lr=[1.0, 2.0, 3.0], momentum=0.5, weight_decay=0.1)
    weight, buffer = torch.zeros(32, 32, dtype=torch.float64), torch.zeros(32, 32, dtype=torch.float64)
    for rate, got in zip((1.0, 2.0, 3.0), run.weights, strict=True):
        buffer = 0.5 * buffer + memory.gradient(TASK, weight)
        weight = (1 - 0.1 * rate) * weight + rate * buffer
        torch.testing.assert_close(got, weight)


def test_any_optimizer_runs_in_the_lab():
    built = memory.simulate(TASK, lambda w: torch.optim.SGD(w, lr=2.0, momentum=0.5, weight_decay=0.0), 3)
    ours = memory.simulate(TASK, "gd", 3, lr=2.0, momentum=0.5)
    torch.testing.assert_close(built.weight, ours.weight)
    muon = memory.simulate(TASK, lambda w: optim.Muon(w, lr=6.0, mode="strict", momentum=0.0, weight_decay=0.0), 2)
    assert muon.column("count") == memory.simulate(TASK, "muon", 2, lr=6.0).column("count")
    adam = memory.simulate(TASK, lambda w: torch.optim.Adam(w, lr=0.1), 3, batch_size=500)
    assert adam.column("count")[-1] > 0


def test_minibatch_runs_see_the_batches_of_the_task():
    run = memory.simulate(TASK, "muon", 2, "sqrt-dim", batch_size=100)
    assert run.column("distinct") == [int(torch.count_nonzero(TASK.sample(100, step))) for step in range(2)]
    first = memory.one_step(TASK, "muon", batch_size=100, lr=32**0.5)
    torch.testing.assert_close(run.weights[0], first)
    second = memory.direction(TASK, "muon", memory.gradient(TASK, first, TASK.sample(100, 1)), TASK.sample(100, 1))
    torch.testing.assert_close(run.weights[1], first + 32**0.5 * second)


def test_named_schedules():
    assert memory.fixed_rates(TASK, "muon", "2-1-1-1", 3) == [2 * 32**0.5, 32**0.5, 32**0.5]
    assert memory.fixed_rates(TASK, "newton", "theory", 2) == [32**-0.5] * 2
    assert memory.fixed_rates(TASK, "gd", "theory", 2) == theory.gd_schedule(32, 1.5, 2)
    assert memory.fixed_rates(TASK, "muon", 3, 2) == [3.0, 3.0]
    assert memory.fixed_rates(TASK, "muon", "line-search", 2) is None


def test_rates_may_be_numbers_and_arrays_of_any_library(unchecked_types):
    for rate in (np.float32(3), torch.tensor(3.0), np.array(3.0), np.full(2, 3.0), torch.full((3,), 3.0)):
        assert memory.fixed_rates(TASK, "muon", rate, 2) == [3.0, 3.0]


def test_a_run_reports_and_stops_when_asked():
    seen = []
    run = memory.simulate(
        TASK, "gd", 5, 1.0, on_step=lambda done, loss: seen.append((done, loss)), should_stop=lambda: len(seen) == 2
    )
    assert [done for done, _ in seen] == [1, 2] == run.column("step")
    assert seen[0][1] == pytest.approx(torch.tensor(3000.0).log().item())


def test_the_first_thresholded_step_is_one_uncentred_step():
    run = memory.simulate_thresholded(TASK, 1)
    expected = memory.direction(TASK, "muon", memory.uncentred_gradient(TASK), TASK.frequencies)
    torch.testing.assert_close(run.weight, 32**0.5 * expected)
    assert run.records[0]["dropped"] == 0


def test_thresholds_drop_what_they_say():
    run = memory.simulate_thresholded(TASK, 3, constant=0.5)
    expected = [0, *(round(0.5 * 32 ** theory.capacity_exponent("muon", 1.5, t)) for t in (1, 2))]
    assert run.column("dropped") == expected
    for drop in ("prefix", "top90"):
        run = memory.simulate_thresholded(TASK, 2, drop=drop)
        recovered = memory.recovered(TASK, run.weights[0])[: run.records[0][drop]]
        assert run.records[1]["dropped"] == int(recovered.sum())
    run = memory.simulate_thresholded(TASK, 2, drop="recovered")
    assert run.records[1]["dropped"] == run.records[0]["count"]
    careful = memory.simulate_thresholded(TASK, 2, drop="recovered", margin=0.2)
    margins = memory.margins(TASK, careful.weights[0], torch.arange(3000))
    assert careful.records[1]["dropped"] == int((margins > 0.2 * 32**0.5).sum())
    assert 0 < careful.records[1]["dropped"] < run.records[1]["dropped"]


def test_bad_settings_are_refused(unchecked_types):
    for settings, message in (
        ({"steps": 2.0}, "`steps` of `memory.simulate` must be an integer; got 2.0"),
        ({"batch_size": 1e2}, "`batch_size` of `memory.simulate` must be an integer; got 100.0"),
        ({"steps": 0}, "`steps` of `memory.simulate` must be >= 1; got 0"),
        ({"batch_size": 0}, "`batch_size` of `memory.simulate` must be >= 1; got 0"),
        ({"momentum": 1.0}, r"`momentum` of `memory.simulate` must be in \[0, 1\); got 1.0"),
        ({"weight_decay": -1.0}, "`weight_decay` of `memory.simulate` must be finite and >= 0"),
        ({"lr": -1.0}, "`lr` of `memory.simulate` must be finite and > 0; got -1.0"),
        ({"lr": [1.0]}, "`lr` of `memory.simulate` must have a rate for each of 4 steps; got 1"),
        ({"lr": "cosine"}, "`lr` of `memory.simulate` must be numbers or one of line-search, .*; got 'cosine'"),
        ({"update": lambda w: torch.optim.SGD(w, lr=1.0), "lr": 1.0}, "belong to the optimizer that `update` builds"),
        ({"gradient": "sampled"}, "`gradient` of .* must be one of exact, hybrid, mean-field; got 'sampled'"),
    ):
        with pytest.raises(ValueError, match=message):
            memory.simulate(TASK, **settings)
    with pytest.raises(ValueError, match=r"`drop` of .* must be schedule, prefix, top90 or recovered; got 'all'"):
        memory.simulate_thresholded(TASK, drop="all")
    with pytest.raises(ValueError, match=r"`margin` of .* must be finite and >= 0; got -1"):
        memory.simulate_thresholded(TASK, margin=-1)
    with pytest.raises(ValueError, match=r"`update` of .* must be gd, muon or h_lambda; got 'newton'"):
        memory.simulate_thresholded(TASK, update="newton")
    with pytest.raises(ValueError, match=r"`constant` of .* must be finite and > 0; got 0"):
        memory.simulate_thresholded(TASK, constant=0)
    measured = memory.Task.from_counts(range(1, 50), dim=4)
    with pytest.raises(ValueError, match=r"`drop`='schedule' of .* needs `alpha`"):
        memory.simulate_thresholded(measured)
    with pytest.raises(ValueError, match=r"`lr`='theory' of .* needs `alpha`"):
        memory.simulate(measured, "gd", lr="theory")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::specgrad.memory.MeanFieldWarning")
def test_line_searched_steps_store_as_much_as_known_and_never_forget():
    task = memory.Task(100_000, 128, 1.5, seed=0, dtype=torch.float32)
    run = memory.simulate(task, "muon", 4, gradient="hybrid")
    assert run.column("count")[-1] >= 270
    assert run.column("prefix") == sorted(run.column("prefix"))
    assert run.column("relative_rate") == pytest.approx([2.4, 1.2, 0.7, 0.5], rel=0.2)
