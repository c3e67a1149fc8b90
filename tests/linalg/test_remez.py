import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from specgrad.linalg.remez import CUBIC, MUON_QUINTIC, QUINTIC, OddPolynomial, minimax_odd, optimal_composition

# Four quintics on [5e-3, 1] with 2 % safety, from an independent computation.
KNOWN = [
    (8.14003, -23.03675, 16.39668),
    (3.85177, -2.76396, 0.508396),
    (3.15859, -2.28370, 0.457664),
    (2.19805, -1.53519, 0.382207),
]

# Errors attainable without safety: left end of the interval -> one error for each row of degrees.
DEGREES = [(5,) * 4, (5,) * 5, (5,) * 3, (7, 5, 5)]
ERRORS = {
    1e-2: (0.0125, 0.0, 0.269, 0.174),
    5e-3: (0.083, 4e-4, 0.495, 0.387),
    3e-3: (0.198, 0.005, 0.646, 0.551),
    2e-3: (0.321, 0.021, 0.744, 0.666),
    1e-3: (0.546, 0.113, 0.860, 0.812),
}


def composed(steps, x):
    for step in steps:
        x = step(x)
    return x


def alternations(step, lo, up):
    """Deviations from 1 at the ends and at the turning points found on a fine grid."""
    x = np.geomspace(lo, up, 200_001)
    deviation = step(x) - 1
    turning = np.flatnonzero(np.diff(np.sign(np.diff(deviation)))) + 1
    return np.concatenate([deviation[:1], deviation[turning], deviation[-1:]])


def test_four_quintics_have_the_known_coefficients_and_error():
    steps = optimal_composition((5, 5, 5, 5), 5e-3, 1.02)
    for step, expected in zip(steps, KNOWN, strict=True):
        assert step.coefficients == pytest.approx(expected, rel=2e-6)
    assert steps[-1].error == pytest.approx(0.098, abs=5e-4)


@pytest.mark.parametrize("interval", ERRORS)
def test_compositions_reach_the_known_attainable_errors(interval):
    got = [optimal_composition(degrees, interval)[-1].error for degrees in DEGREES]
    assert got == pytest.approx(ERRORS[interval], abs=6e-4)


@pytest.mark.parametrize("degrees, safety", [((5,) * 4, 1.02), ((7, 5, 5), 1.03), ((3, 9, 3), 1.0), ((5,) * 4, 1.0)])
def test_each_step_equioscillates_on_the_interval_left_by_the_one_before(degrees, safety):
    lo, up = 5e-3, 1.0
    for degree, step in zip(degrees, optimal_composition(degrees, 5e-3, safety), strict=True):
        peaks = alternations(step, lo, safety * up)
        assert len(peaks) == (degree + 1) // 2 + 1
        assert np.abs(peaks) == pytest.approx(step.error, rel=1e-6)
        assert (np.diff(np.sign(peaks)) != 0).all()
        lo, up = 1 - step.error, 1 + step.error


@settings(deadline=None, max_examples=100)
@given(
    degree=st.sampled_from([3, 5, 7, 9]),
    ratio=st.floats(-8, -1e-6).map(lambda power: 10**power),
    up=st.floats(-3, 3).map(lambda power: 10**power),
)
def test_exchange_levels_the_deviation_on_intervals_of_any_width_and_place(degree, ratio, up):
    step = minimax_odd(degree, ratio * up, up)
    largest = np.abs(step(np.geomspace(ratio * up, up, 2001)) - 1).max()
    # Coefficients of degree 9 run into the hundreds, so that evaluating the polynomial alone loses three digits.
    assert largest <= step.error + 1e-12
    assert largest >= step.error * (1 - 1e-3) - 1e-12


def test_end_points_deviate_by_the_stated_error_to_fourteen_digits():
    for lo in (1e-3, 0.1, 0.5, 0.9):
        for degree in (3, 5, 7):
            step = minimax_odd(degree, lo, 1.0)
            assert 1 - step(np.array(lo)) == pytest.approx(step.error, abs=3e-14)


def test_composition_maps_its_interval_to_within_the_error_of_the_last_step():
    for degrees in DEGREES:
        steps = optimal_composition(degrees, 2e-3, 1.0)
        deviation = np.abs(composed(steps, np.geomspace(2e-3, 1, 100_001)) - 1).max()
        assert deviation == pytest.approx(steps[-1].error, rel=1e-5, abs=1e-12)


def test_errors_fall_to_rounding_and_stay_there_when_steps_are_added():
    errors = [step.error for step in optimal_composition((5,) * 8, 0.1)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] <= 1e-15


@pytest.mark.parametrize("degree, classical", [(3, CUBIC), (5, QUINTIC)])
def test_minimax_polynomials_of_vanishing_intervals_are_the_classical_convergent_ones(degree, classical):
    for half_width in (1e-2, 1e-3, 1e-9):
        got = minimax_odd(degree, 1 - half_width, 1 + half_width).coefficients
        assert got == pytest.approx(classical.coefficients, abs=3 * half_width)


def test_classical_sets_are_as_published():
    assert MUON_QUINTIC.coefficients == (3.4445, -4.7750, 2.0315)
    assert CUBIC.coefficients == (1.5, -0.5)
    assert QUINTIC.coefficients == (1.875, -1.25, 0.375)
    assert CUBIC(np.array(1.0)) == QUINTIC(np.array(1.0)) == 1


@pytest.mark.parametrize("degree, lo, up", [(4, 0.1, 1.0), (1, 0.1, 1.0), (11, 0.1, 1.0)])
def test_degrees_that_are_even_or_out_of_range_are_refused(degree, lo, up):
    with pytest.raises(ValueError, match=rf"`degree` of `minimax_odd` must be an odd number from 3 to 9; got {degree}\."):
        minimax_odd(degree, lo, up)


@pytest.mark.parametrize("lo, up", [(0.0, 1.0), (-1.0, 1.0), (1.0, 1.0), (0.5, float("inf")), (float("nan"), 1.0)])
def test_intervals_that_are_empty_or_touch_zero_are_refused(lo, up):
    with pytest.raises(ValueError, match=r"`lo` and `up`.*0 < lo < up < inf; got"):
        minimax_odd(5, lo, up)


@pytest.mark.parametrize(
    "degrees, interval, safety, message",
    [
        ((), 0.1, 1.0, r"`degrees`.*at least one step"),
        ((5, 6), 0.1, 1.0, r"`degree`.*odd.*got 6"),
        ((5,), 0.0, 1.0, r"`interval`.*between 0 and 1; got 0\.0"),
        ((5,), 1.0, 1.0, r"`interval`.*between 0 and 1; got 1\.0"),
        ((5,), 0.1, 0.99, r"`safety`.*at least 1.*got 0\.99"),
        ((5,), 0.1, float("nan"), r"`safety`.*got nan"),
    ],
)
def test_compositions_out_of_range_are_refused(degrees, interval, safety, message):
    with pytest.raises(ValueError, match=message):
        optimal_composition(degrees, interval, safety)


def test_polynomials_of_one_term_are_refused():
    with pytest.raises(ValueError, match=r"`coefficients`.*at least two.*\(2\.0,\)"):
        OddPolynomial((2.0,))
