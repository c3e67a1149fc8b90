import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from specgrad.linalg import nuclear_norm, nuclear_rank, singular_values, spectral_norm, stable_rank
from specgrad.linalg.ranks import gram_eigenvalues, nuclear_rank_of_squares, short_gram, stable_rank_of_squares
from tests.reference_matrices import RANK, build


@pytest.mark.parametrize("case", RANK["matrices"], ids=lambda case: case["recipe"]["kind"])
def test_ranks_and_norms_are_the_known_ones(case):
    array = build(case["recipe"])
    assert list(array.shape) == case["check"]["shape"]
    assert array.sum() == pytest.approx(case["check"]["total"], rel=1e-9, abs=1e-9)
    matrix = torch.from_numpy(array)
    assert spectral_norm(matrix).item() == pytest.approx(case["op"], rel=1e-9)
    assert nuclear_norm(matrix).item() == pytest.approx(case["nuc"], rel=1e-9)
    assert stable_rank(matrix).item() == pytest.approx(case["st"], rel=1e-9)
    assert nuclear_rank(matrix).item() == pytest.approx(case["nr"], rel=1e-9)


@settings(deadline=None)
@given(rows=st.integers(1, 9), cols=st.integers(1, 9), seed=st.integers(0, 10**6), scale=st.sampled_from([1e-30, 1.0, 1e30]))
def test_one_le_stable_rank_le_nuclear_rank_le_rank_whatever_scale_and_transposition(rows, cols, seed, scale):
    matrix = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    stable, nuclear = stable_rank(matrix).item(), nuclear_rank(matrix).item()
    assert 1 - 1e-12 <= stable <= nuclear + 1e-9 <= min(rows, cols) + 2e-9
    assert stable_rank(matrix.mT * scale).item() == pytest.approx(stable, rel=1e-10)
    assert nuclear_rank(matrix.mT * scale).item() == pytest.approx(nuclear, rel=1e-10)


@pytest.mark.parametrize("shape, rank", [((30, 80), 30), ((80, 30), 5), ((64, 64), 1)])
def test_ranks_from_the_short_gram_matrix_equal_those_from_singular_values(shape, rank):
    generator = torch.Generator().manual_seed(rank)
    left = torch.randn(shape[0], rank, generator=generator, dtype=torch.float64)
    matrix = left @ torch.randn(rank, shape[1], generator=generator, dtype=torch.float64)
    squares = gram_eigenvalues(short_gram(matrix))
    assert nuclear_rank_of_squares(squares).item() == pytest.approx(nuclear_rank(matrix).item(), rel=1e-6)
    assert stable_rank_of_squares(squares).item() == pytest.approx(stable_rank(matrix).item(), rel=1e-10)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_extreme_float64_matrices_have_their_rank(scale):
    matrix = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert stable_rank(matrix * scale).item() == pytest.approx(stable_rank(matrix).item(), rel=1e-9)
    assert nuclear_rank(matrix * scale).item() == pytest.approx(nuclear_rank(matrix).item(), rel=1e-9)


def test_a_zero_or_non_finite_matrix_has_no_rank_and_does_not_disturb_its_batch():
    batch = torch.eye(3).repeat(3, 1, 1)
    batch[0] = 0
    batch[1, 0, 0] = torch.nan
    for rank in (stable_rank, nuclear_rank):
        got = rank(batch)
        assert got[:2].isnan().all()
        assert got[2].item() == pytest.approx(3)


@pytest.mark.parametrize(
    "value, error",
    [(torch.ones(3), ValueError), (torch.ones(2, 0), ValueError), (torch.eye(2).int(), TypeError), ([[1.0]], TypeError)],
)
def test_what_is_no_real_matrix_is_refused(unchecked_types, value, error):
    with pytest.raises(error, match="`matrix`"):
        singular_values(value)


def test_half_precision_matrices_are_ranked_in_float64():
    matrix = torch.from_numpy(np.diag([300.0, 300.0])).half()
    assert stable_rank(matrix).item() == 2.0
