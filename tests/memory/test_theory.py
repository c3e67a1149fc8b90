import math

import pytest
import torch

from specgrad import memory
from specgrad.memory import theory


@pytest.mark.parametrize(
    ("alpha", "exponents"),
    [(1.25, (1.400, 1.640, 1.784, 1.870)), (1.5, (1.333, 1.556, 1.704, 1.802)), (2.0, (1.250, 1.438, 1.578, 1.684))],
)
def test_exponents_of_muon_are_those_of_the_paper_and_obey_its_recursion(alpha, exponents):
    got = [theory.capacity_exponent("muon", alpha, t) for t in (1, 2, 3, 4)]
    assert got == pytest.approx(exponents, abs=6e-4)
    for now, following in zip([1.0, *got], got, strict=False):
        assert following == pytest.approx(1 / alpha + now * (1 - 1 / (2 * alpha)))


def test_gradient_descent_gains_a_fixed_factor_and_then_follows_muon():
    got = [theory.capacity_exponent("gd", 1.5, t) for t in range(1, 6)]
    assert got == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 14 / 9])
    assert theory.capacity_exponent("gd", 2.0, 40) == pytest.approx(2, abs=1e-3)


@pytest.mark.parametrize("alpha", [1.1, 1.5, 3.0])
def test_the_critical_batch_is_where_the_two_limits_meet(alpha):
    for update in ("gd", "muon", "newton"):
        batch = theory.critical_batch(update, 100, alpha)
        assert theory.capacity(update, 100, alpha, batch) == pytest.approx(theory.capacity(update, 100, alpha))
        assert theory.capacity(update, 100, alpha, batch / 10) < theory.capacity(update, 100, alpha)
    assert theory.critical_batch_exponent("muon", alpha) == pytest.approx(alpha + 0.5)
    assert theory.critical_batch_exponent("gd", alpha) == pytest.approx(0.5)


def test_losses_follow_from_capacities():
    assert theory.loss_exponent("muon", 1.5) == pytest.approx(1 / 3 + 0.5 - 1.5)
    p = memory.Task(1000, 1, 1.5).frequencies
    assert theory.loss_of_capacity(p, 0) == pytest.approx(math.log(1000))
    assert theory.loss_of_capacity(p, 1000) == 0


def test_the_loss_is_that_of_the_smaller_capacity():
    assert theory.loss("muon", 64, 1.5) == pytest.approx(64 ** theory.loss_exponent("muon", 1.5))
    assert theory.loss("newton", 64, 1.5, batch_size=100) == pytest.approx(100 ** (1 / 1.5 - 1))
    assert theory.loss("muon", 64, 1.5, batch_size=10**9) == theory.loss("muon", 64, 1.5)


def test_the_resolution_of_a_step_is_the_bulk_of_the_next_gradient():
    # lambda_t = d_{t+1}^-alpha sqrt(d) = d_t^(1/2 - alpha) / sqrt(d), the bulk singular value of the thresholded gradient.
    for t in (1, 2, 3):
        bulk = (0.5 - 1.5) * theory.capacity_exponent("muon", 1.5, t) - 0.5
        assert theory.resolution_of_step(64, 1.5, t) == pytest.approx(64**bulk)


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_distinct_items_follow_the_asymptotic_law_while_few(alpha):
    p = memory.Task(100_000, 1, alpha).frequencies
    for batch in (100, 1000, 10_000):
        exact = theory.expected_distinct(p, batch)
        assert exact < 100_000 / 20
        assert theory.asymptotic_distinct(alpha, batch) == pytest.approx(exact, rel=0.05)


def test_expected_distinct_items_are_the_mean_over_batches():
    task = memory.Task(2000, 1, 1.5)
    drawn = torch.tensor([float(torch.count_nonzero(task.sample(300, step))) for step in range(400)])
    error = drawn.std().item() / 20
    assert drawn.mean().item() == pytest.approx(theory.expected_distinct(task.frequencies, 300), abs=4 * error)


def test_spectra_of_the_start_gradient_have_the_exponents_of_the_lemma():
    exponents = {}
    for dim in (64, 256):
        spectra = [
            memory.leave_one_out_spectrum(memory.Task(10_000, dim, 1.5, seed=s, dtype=torch.float32), 20) for s in range(3)
        ]
        exponents[dim] = [
            torch.stack([s[dim // 2] for s in spectra]).log().median().item(),
            torch.stack([(1 / s).sum() for s in spectra]).log().median().item(),
        ]
    slopes = [(b - a) / math.log(4) for a, b in zip(exponents[64], exponents[256], strict=True)]
    want = theory.spectrum_exponents(1.5)
    assert slopes[0] == pytest.approx(want["half"], abs=0.1)
    # A sum over the smallest singular values fluctuates: 0.4 is its spread over seeds.
    assert slopes[1] == pytest.approx(want["inverse_sum"], abs=0.4)


def test_bad_exponents_are_refused(unchecked_types):
    with pytest.raises(ValueError, match=r"`alpha` of `memory.theory` must be > 1"):
        theory.capacity_exponent("muon", 1.0)
    with pytest.raises(ValueError, match=r"`steps` of `memory.theory.capacity_exponent` must be >= 1; got 0"):
        theory.capacity_exponent("muon", 1.5, 0)
    with pytest.raises(ValueError, match=r"`update` of `memory.theory.learning_rate` must be gd"):
        theory.learning_rate("adam", 10)
    for sizes in ((0, 1.5), (10, 1.5, 0)):
        with pytest.raises(ValueError, match=r"`dim` and `batch_size` of `memory.theory` must be >= 1"):
            theory.capacity("muon", *sizes)
    with pytest.raises(ValueError, match=r"`update` of .* must be gd, muon, h_lambda or newton; got 'adam'"):
        theory.capacity_exponent("adam", 1.5)


@pytest.mark.slow
def test_local_slopes_at_large_dim_are_those_of_the_theory():
    counts = {}
    for dim in (256, 512):
        for update in ("gd", "muon", "newton"):
            values = []
            for seed in range(2):
                task = memory.Task(50_000, dim, 1.5, seed=seed, dtype=torch.float32)
                values.append(memory.capacity(task, memory.one_step(task, update))["count"])
            counts[update, dim] = sum(values) / 2
    for update in ("muon", "newton"):
        slope = math.log2(counts[update, 512] / counts[update, 256])
        assert slope == pytest.approx(theory.capacity_exponent(update, 1.5), abs=0.06)
    assert counts["muon", 256] > 20 * counts["gd", 256]
