import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from specgrad.linalg import (
    estimate_nuclear_rank,
    estimate_spectral_norm,
    estimate_stable_rank,
    nuclear_rank,
    spectral_norm,
    stable_rank,
)
from specgrad.linalg.estimators import Operator


def relu_features(tokens=600, width=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, width // 2, generator=generator) @ torch.randn(width // 2, width, generator=generator)
    ).relu()


@pytest.mark.parametrize("steps, bound", [(1, 1e-2), (3, 1e-4), (10, 1e-5)])
def test_a_few_steps_from_the_mean_are_enough_for_inputs_with_a_mean_spike(steps, bound):
    inputs = relu_features()
    got = estimate_stable_rank(inputs, steps=steps)
    assert got.value == pytest.approx(stable_rank(inputs).item(), rel=bound)


def test_inputs_without_a_spike_need_more_steps_and_the_error_says_so():
    inputs = torch.randn(600, 200, generator=torch.Generator().manual_seed(1))
    truth = stable_rank(inputs).item()
    few, many = estimate_stable_rank(inputs, steps=3), estimate_stable_rank(inputs, steps=40)
    assert few.value > 1.02 * truth
    assert few.error > 0.02
    assert many.value == pytest.approx(truth, rel=1e-3)
    assert many.error < 0.01


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 15), cols=st.integers(1, 15), steps=st.integers(1, 20), seed=st.integers(0, 10**6))
def test_the_spectral_norm_is_never_overestimated_and_exact_when_the_space_is_exhausted(rows, cols, steps, seed):
    matrix = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    truth = spectral_norm(matrix).item()
    got = estimate_spectral_norm(matrix, steps=steps)
    assert got.value <= truth * (1 + 1e-10)
    if steps >= cols:
        assert got.value == pytest.approx(truth, rel=1e-6)
    assert estimate_stable_rank(matrix, steps=steps).value >= stable_rank(matrix).item() * (1 - 1e-10)


def test_nuclear_rank_of_a_flat_spectrum_is_within_its_stated_error():
    matrix = torch.randn(300, 500, generator=torch.Generator().manual_seed(2))
    got = estimate_nuclear_rank(matrix, steps=20, probes=16, generator=torch.Generator().manual_seed(0))
    truth = nuclear_rank(matrix).item()
    assert abs(got.value - truth) <= (4 * got.error + 0.01) * truth
    assert got.error < 0.03
    assert got.side == "either"


def test_an_operator_gives_what_its_matrix_gives():
    matrix = relu_features().double()
    operator = Operator(*matrix.shape, lambda v: matrix @ v, lambda v: matrix.mT @ v)
    frobenius = matrix.square().sum().item()
    start = matrix.mean(0)
    by_operator, by_matrix = estimate_stable_rank(operator, 5, start, frobenius), estimate_stable_rank(matrix, 5, start)
    assert by_operator.value == pytest.approx(by_matrix.value, rel=1e-12)
    assert by_operator.error == pytest.approx(by_matrix.error, rel=1e-6)
    one, two = (
        estimate_nuclear_rank(m, generator=torch.Generator().manual_seed(0), squared_frobenius=f)
        for m, f in ((operator, frobenius), (matrix, None))
    )
    assert one.value == pytest.approx(two.value, rel=1e-9)


def test_low_rank_and_zero_matrices_are_handled():
    low = torch.outer(torch.arange(1.0, 7), torch.ones(4))
    assert estimate_stable_rank(low).value == pytest.approx(1, rel=1e-5)
    assert estimate_nuclear_rank(low, probes=400, generator=torch.Generator().manual_seed(0)).value == pytest.approx(
        1, rel=0.2
    )
    zero = torch.zeros(3, 4)
    assert estimate_spectral_norm(zero).value == 0
    assert math.isnan(estimate_stable_rank(zero).value)
    assert math.isnan(estimate_nuclear_rank(zero).value)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e9, 1e19, 1e30])
def test_estimates_keep_their_side_and_value_at_any_scale(scale):
    matrix = torch.randn(200, 100, generator=torch.Generator().manual_seed(0))
    norm, rank = estimate_spectral_norm(matrix * scale), estimate_stable_rank(matrix * scale)
    assert norm.value == pytest.approx(scale * estimate_spectral_norm(matrix).value, rel=1e-4)
    assert rank.value == pytest.approx(estimate_stable_rank(matrix).value, rel=1e-4)
    assert rank.value >= stable_rank(matrix).item() * (1 - 1e-6)
    assert estimate_nuclear_rank(matrix * scale).value == pytest.approx(nuclear_rank(matrix).item(), rel=0.3)


def test_non_finite_matrices_have_no_estimate():
    matrix = torch.ones(3, 3)
    matrix[0, 0] = torch.inf
    for estimate in (estimate_spectral_norm, estimate_stable_rank, estimate_nuclear_rank):
        assert math.isnan(estimate(matrix).value)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m: estimate_spectral_norm(m, steps=0), r"`steps` must be >= 1; got 0"),
        (lambda m: estimate_spectral_norm(m, start=torch.ones(3)), "`start` must have 2 entries"),
        (lambda m: estimate_nuclear_rank(m, probes=0), r"`steps` and `probes`.*12 and 0"),
        (lambda m: estimate_stable_rank(Operator.of(m)), "`squared_frobenius`"),
        (lambda m: estimate_nuclear_rank(Operator.of(m)), "`squared_frobenius`"),
    ],
)
def test_bad_settings_are_refused_by_name(call, message, unchecked_types):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 2))
