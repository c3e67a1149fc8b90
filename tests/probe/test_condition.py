import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from specgrad.linalg import nuclear_rank, stable_rank
from specgrad.probe import condition
from tests.reference_matrices import RANK, least_squares

CASES = RANK["least_squares_condition"]["cases"]


@pytest.mark.parametrize(
    "ratio, verdict", [(1e3, "holds"), (2.0, "holds"), (1.999, "marginal"), (0.5, "marginal"), (0.499, "fails")]
)
def test_verdict_has_a_margin_of_two_on_either_side_of_the_papers_condition(ratio, verdict):
    assert condition(3 * ratio, 3.0).verdict == verdict


@given(st.floats(1, 1e6), st.floats(1, 1e6))
def test_the_margin_is_the_factor_that_takes_the_ratio_to_the_next_threshold(nuclear, stable):
    got = condition(nuclear, stable)
    assert got.margin >= 1
    moved = {got.ratio * got.margin, got.ratio / got.margin}
    assert any(math.isclose(m, threshold, rel_tol=1e-9) for m in moved for threshold in (0.5, 2.0))


@pytest.mark.parametrize("nuclear, stable", [(math.nan, 2.0), (2.0, math.nan), (2.0, 0.0)])
def test_without_a_rank_there_is_no_verdict(nuclear, stable):
    got = condition(nuclear, stable)
    assert got.verdict == "undefined"
    assert math.isnan(got.ratio)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_ratio_and_condition_of_least_squares_problems_are_the_known_ones(case):
    inputs, gradient = least_squares(case)
    assert inputs.sum() == pytest.approx(case["check_A"]["total"], rel=1e-9)
    got = condition(nuclear_rank(torch.from_numpy(gradient)).item(), stable_rank(torch.from_numpy(inputs)).item())
    # After a hundred steps the gradient is small and its rounding errors grow with the number of steps.
    assert got.ratio == pytest.approx(case["nr_G"] / case["st_A"], rel=1e-6)
    assert (got.ratio >= 1) == case["condition"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_ratio_equals_the_ratio_of_the_two_guaranteed_decreases(case):
    assert case["delta_spec"] / case["delta_gd"] == pytest.approx(case["nr_G"] / case["st_A"], rel=1e-9)
    assert np.isclose(case["ratio_predicted"], case["delta_spec"] / case["delta_gd"])
