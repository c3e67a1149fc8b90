import math
import warnings

import pytest
import torch

from specgrad import memory

pytestmark = pytest.mark.filterwarnings("ignore::specgrad.memory.MeanFieldWarning")


@pytest.fixture(scope="module")
def second_step():
    """A task and its weight after one Muon step of rate sqrt(d)."""
    task = memory.Task(num_items=4000, dim=32, alpha=1.5, seed=2)
    return task, 32**0.5 * memory.one_step(task, "muon")


def relative_error(got, exact):
    return float((got - exact).norm() / exact.norm())


@pytest.mark.parametrize("moments_from", ["sample", "gauss"])
def test_mean_field_is_exact_for_a_tiny_weight(moments_from):
    task = memory.Task(500, 8, 1.5)
    weight = 1e-7 * torch.eye(8)
    got = memory.estimate_gradient(task, weight, method="mean-field", moments_from=moments_from)
    exact = memory.gradient(task, weight)
    # Gaussian moments ignore the mean of the unembeddings, of size 1/sqrt(N).
    assert relative_error(got.gradient, exact) < (1e-12 if moments_from == "sample" else 0.1)


def test_hybrid_with_all_rows_is_exact(second_step):
    task, weight = second_step
    got = memory.estimate_gradient(task, weight, method="hybrid", rows=task.num_items - 1)
    # The one row left out has an error of 3e-8.
    assert relative_error(got.gradient, memory.gradient(task, weight)) <= 1.1 * got.relative_error < 1e-7
    assert got.loss == pytest.approx(memory.loss(task, weight), rel=1e-6)
    whole = memory.estimate_gradient(task, weight, method="hybrid", rows=task.num_items)
    assert torch.equal(whole.gradient, memory.gradient(task, weight))
    assert whole.relative_error == 0


def test_error_falls_with_exact_rows_and_its_estimate_follows(second_step):
    task, weight = second_step
    exact = memory.gradient(task, weight)
    errors = []
    for rows in (0, 32, 128, 512):
        got = memory.estimate_gradient(task, weight, method="hybrid", rows=rows)
        errors.append(relative_error(got.gradient, exact))
        assert errors[-1] / 2 < got.relative_error < errors[-1] * 2
        assert got.exact_rows == rows
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 100


def test_tolerance_adds_rows_until_the_estimate_is_below_it(second_step):
    task, weight = second_step
    loose = memory.estimate_gradient(task, weight, rows=0)
    assert loose.polar_error > 0.02
    tight = memory.estimate_gradient(task, weight, rows=0, tolerance=0.02)
    assert 0.01 < tight.polar_error <= 0.0205
    assert 0 < tight.exact_rows < task.num_items


def test_error_falls_with_the_root_of_the_number_of_items():
    scaled = []
    for items in (5000, 10_000, 20_000):
        task = memory.Task(items, 64, 1.5, seed=1)
        weight = 8 * memory.one_step(task, "muon")
        got = memory.estimate_gradient(task, weight, method="mean-field").gradient
        scaled.append(relative_error(got, memory.gradient(task, weight)) * math.sqrt(items))
    assert max(scaled) / min(scaled) < 1.15


def test_minibatches_and_streams_give_the_same_as_memory(second_step):
    task, weight = second_step
    streamed = memory.Task(num_items=4000, dim=32, alpha=1.5, seed=2, storage="stream")
    q = task.sample(3000)
    for frequencies in (None, q):
        for method in ("mean-field", "hybrid", "exact"):
            held = memory.estimate_gradient(task, weight, frequencies, method, rows=50)
            again = memory.estimate_gradient(streamed, weight, frequencies, method, rows=50)
            torch.testing.assert_close(again.gradient, held.gradient, rtol=0, atol=1e-13)
            assert again.loss == pytest.approx(held.loss, rel=1e-12)


def test_losses_along_a_line_are_those_of_single_weights(second_step):
    task, weight = second_step
    along = memory.one_step(task, "gd")
    rates = torch.tensor([0.0, 1.0, 20.0], dtype=torch.float64)
    got = memory.mean_field.losses_along(task, weight, along, rates, task.frequencies)
    everyone = memory.mean_field.losses_along(task, weight, along, rates, task.frequencies, torch.arange(4000))
    for rate, value, exact in zip(rates.tolist(), got.tolist(), everyone.tolist(), strict=True):
        single = memory.estimate_gradient(task, weight + rate * along, method="mean-field")
        assert value == pytest.approx(single.loss, rel=1e-10)
        assert exact == pytest.approx(memory.loss(task, weight + rate * along), rel=1e-10)


@pytest.mark.filterwarnings("default::specgrad.memory.MeanFieldWarning")
def test_large_steps_are_warned_about(second_step):
    task, weight = second_step
    with pytest.warns(memory.MeanFieldWarning, match=r"not to be trusted here"):
        memory.estimate_gradient(task, 4 * weight)
    with pytest.warns(memory.MeanFieldWarning, match=r"calibrated for Muon.* columns=0 below dim=32"):
        memory.simulate(task, "gd", 1, 1.0, gradient="hybrid", columns=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = memory.simulate(task, "gd", 2, 1.0, gradient="hybrid")
    assert run.column("exact_columns") == [0, 32]


def test_exact_columns_make_the_estimate_right_for_gradient_descent():
    task = memory.Task(10_000, 64, 1.5, seed=701)
    weight = memory.simulate(task, "gd", 1).weight
    exact = memory.gradient(task, weight)
    errors, ratios = [], []
    for columns in (0, 64):
        got = memory.estimate_gradient(task, weight, columns=columns)
        errors.append(relative_error(got.gradient, exact))
        ratios.append(errors[-1] / got.relative_error)
    assert errors[1] < errors[0] / 10
    assert ratios[0] > 20
    assert 0.25 < ratios[1] < 4


@pytest.mark.parametrize("moments_from", ["sample", "gauss"])
def test_columns_change_nothing_where_the_logits_are_gaussian_and_all_of_them_are_exact(moments_from):
    task = memory.Task(60, 8, 1.5)
    weight = 4 * memory.one_step(task, "gd")
    exact = memory.gradient(task, weight)
    errors = []
    for columns in (0, 20, 58):
        got = memory.estimate_gradient(task, weight, method="mean-field", columns=columns, moments_from=moments_from)
        errors.append(relative_error(got.gradient, exact))
    assert errors == sorted(errors, reverse=True)
    # Two outputs are left to average: only their own spread is lost.
    assert errors[-1] < errors[0] / 5


def test_bad_settings_are_refused(unchecked_types, second_step):
    task, weight = second_step
    with pytest.raises(ValueError, match=r"`method` of .* must be one of exact, hybrid, mean-field; got 'sampled'"):
        memory.estimate_gradient(task, weight, method="sampled")
    with pytest.raises(ValueError, match=r"`rows` of .* must be >= 0; got -1"):
        memory.estimate_gradient(task, weight, rows=-1)
    with pytest.raises(ValueError, match=r"`rows` of .* must be an integer; got 3.0"):
        memory.estimate_gradient(task, weight, rows=3.0)
    for columns in (-1, 3999):
        with pytest.raises(ValueError, match=r"`columns` of .* must be >= 0 and leave two of 4000 outputs; got"):
            memory.estimate_gradient(task, weight, columns=columns)
    with pytest.raises(ValueError, match=r"`tolerance` of .* must be > 0; got -1"):
        memory.estimate_gradient(task, weight, tolerance=-1)
    arrays = memory.Task.from_arrays(task.unembeddings, task.embeddings, task.frequencies)
    with pytest.raises(ValueError, match=r"`moments_from`='gauss' of .* needs Gaussian unembeddings; got arrays"):
        memory.estimate_gradient(arrays, weight, moments_from="gauss")
    with pytest.raises(ValueError, match=r"`moments_from` of .* must be sample or gauss; got 'mean'"):
        memory.estimate_gradient(task, weight, moments_from="mean")
