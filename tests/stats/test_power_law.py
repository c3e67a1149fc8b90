import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgrad.stats import exponent_check, fit_power_law, local_slopes

X = np.array([16.0, 32.0, 64.0, 128.0, 256.0])


def sample(exponent, scatter, num_seeds, seed=0, x=X):
    generator = np.random.default_rng(seed)
    xs, seeds = np.tile(x, num_seeds), np.repeat(np.arange(num_seeds), len(x))
    return xs, 3 * xs**exponent * np.exp(scatter * generator.standard_normal(len(xs))), seeds


@given(st.floats(-3, 3), st.floats(1e-3, 1e3))
@settings(max_examples=25, deadline=None)
def test_exact_power_laws_are_found_exactly(exponent, amplitude):
    fit = fit_power_law(X, amplitude * X**exponent)
    assert fit.exponent == pytest.approx(exponent, abs=1e-9)
    assert fit.amplitude == pytest.approx(amplitude, rel=1e-9)
    assert fit(32.0) == pytest.approx(amplitude * 32.0**exponent)


def test_without_repetitions_or_errors_it_is_least_squares_in_logarithms():
    y = X**1.5 * np.array([1.1, 0.8, 1.3, 0.9, 1.0])
    slope, intercept = np.polyfit(np.log(X), np.log(y), 1)
    fit = fit_power_law(X, y)
    assert fit.exponent == pytest.approx(slope)
    assert fit.amplitude == pytest.approx(math.exp(intercept))


def test_given_errors_weigh_values_as_in_weighted_least_squares():
    y = X**1.5 * np.array([1.1, 0.8, 1.3, 0.9, 1.0])
    stderr = y * np.array([0.01, 0.1, 0.2, 0.05, 0.3])
    slope, _ = np.polyfit(np.log(X), np.log(y), 1, w=y / stderr)
    assert fit_power_law(X, y, stderr=stderr).exponent == pytest.approx(slope)


def test_noisy_points_weigh_less_than_quiet_ones():
    xs, y, seeds = sample(1.0, 0.02, 6)
    wild = y * np.where(xs == 256, np.exp(np.random.default_rng(1).standard_normal(len(xs))), 1)
    assert abs(fit_power_law(xs, wild, seeds).exponent - 1) < abs(np.polyfit(np.log(xs), np.log(wild), 1)[0] - 1)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    covered = 0
    for seed in range(120):
        fit = fit_power_law(*sample(2.0, 0.2, 5, seed), resamples=200, confidence=0.9)
        covered += fit.low <= 2.0 <= fit.high
    # 90 % of 120 is 108, with a standard deviation of 3.3.
    assert 96 <= covered <= 119


def test_the_interval_of_few_independent_values_covers_the_truth_about_as_often_as_it_says():
    covered = 0
    for seed in range(120):
        xs, y, _ = sample(2.0, 0.2, 2, seed, X[:3])
        fit = fit_power_law(xs, y, resamples=200, confidence=0.9)
        covered += fit.low <= 2.0 <= fit.high
    assert 98 <= covered <= 119


def test_unreached_values_enter_as_bounds_and_not_as_the_horizon():
    horizon, exact = 3 * 150.0**2, []
    for seed in range(20):
        xs, y, seeds = sample(2.0, 0.3, 8, seed)
        unreached = y > horizon
        assert unreached.any()
        clipped = np.minimum(y, horizon)
        tobit = fit_power_law(xs, clipped, seeds, censored=unreached, resamples=2).exponent
        dropped = fit_power_law(xs[~unreached], y[~unreached], seeds[~unreached], resamples=2).exponent
        replaced = fit_power_law(xs, clipped, seeds, resamples=2).exponent
        exact.append((tobit, dropped, replaced))
    tobit, dropped, replaced = np.mean(exact, axis=0)
    assert abs(tobit - 2) < 0.05
    assert replaced < 1.75
    assert abs(tobit - 2) < abs(dropped - 2)


def test_values_below_what_can_be_seen_enter_as_bounds_too():
    found = []
    for seed in range(20):
        xs, y, seeds = sample(2.0, 0.3, 8, seed)
        unseen = y < 3 * 25.0**2
        assert unseen.any()
        found.append(fit_power_law(xs, np.maximum(y, 3 * 25.0**2), seeds, below=unseen, resamples=2).exponent)
    assert abs(np.mean(found) - 2) < 0.05


def test_the_window_is_the_one_asked_for_and_is_recorded():
    y = np.where(X < 64, 1.0, X / 64)
    fit = fit_power_law(X, y, window=(64, 256))
    assert fit.exponent == pytest.approx(1.0)
    assert (fit.window, fit.num_values, fit.num_outside) == ((64, 256), 3, 2)
    assert fit_power_law(X, y).window == (16, 256)


def test_the_fit_says_how_many_values_were_unreached():
    fit = fit_power_law(X, X, censored=X > 100)
    assert fit.num_censored == 2
    assert "2 of 5 unreached" in str(fit)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"y": [1.0, 2.0]}, "`x`, `y`, `censored` and `below` .* must be as long as each other"),
        ({"y": [1.0, -2.0, 3.0, 4.0, 5.0]}, "`y` .* must be finite and > 0 .*; got -2.0 at position 1"),
        ({"y": [1.0, math.nan, 3.0, 4.0, 5.0]}, "mark an unreached value as censored.*got nan"),
        ({"window": (100.0, 130.0)}, r"`x` .* at least two different values .* window \[100, 130\]; got \[128.0\]"),
        ({"censored": [False, True, True, True, True]}, "at least two different values with reached `y`"),
        ({"seeds": [0, 1]}, r"`seeds` .* one entry per value \(5\); got 2"),
        ({"stderr": [0.0] * 5}, "`stderr` .* must be finite and > 0"),
        ({"confidence": 1.0}, "`confidence` .* between 0 and 1; got 1.0"),
    ],
)
def test_bad_input_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        fit_power_law(**({"x": X, "y": X} | settings))


def test_local_slopes_show_where_a_law_begins():
    y = np.where(X < 64, 64.0**2, X**2)
    got = local_slopes(X, y)
    assert got.slopes == pytest.approx([0, 0, 2, 2])
    assert got.x == pytest.approx(np.sqrt(X[1:] * X[:-1]))
    assert np.isnan(got.stderr).all()


def test_local_slopes_next_to_an_unreached_value_are_undefined():
    assert np.isnan(local_slopes(X, X, censored=X > 200).slopes).tolist() == [False, False, False, True]


def test_an_exponent_check_passes_near_the_prediction_and_fails_away_from_it_or_when_unsure():
    sharp = fit_power_law(*sample(2.0, 0.02, 6))
    assert exponent_check("capacity", sharp, 2.0, 0.05).passed
    assert not exponent_check("capacity", sharp, 1.5, 0.05).passed
    vague = fit_power_law(*sample(2.0, 2.0, 3))
    check = exponent_check("capacity", vague, 2.0, 0.05)
    assert not check.passed
    assert "], too wide; local slopes " in check.got
    assert str(exponent_check("c", sharp, 1.5, 0.05)).startswith("FAIL  c: expected 1.5 (tolerance 0.05 beyond")
