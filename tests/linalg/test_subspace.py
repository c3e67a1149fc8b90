import pytest
import torch

from specgrad.linalg.estimators import Operator
from specgrad.linalg.subspace import top_pair, top_subspace


def inputs(kind, rows=400, cols=60):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    return {"spike": x + 1, "flat": x, "relu2": x.relu().square(), "one token": x * torch.eye(rows, 1).mul(59).add(1)}[kind]


@pytest.mark.parametrize("kind", ["spike", "flat", "relu2", "one token"])
@pytest.mark.parametrize("parts", [1, 4])
def test_the_estimate_lies_below_the_top_eigenvalue_and_within_its_stated_error(kind, parts):
    x = inputs(kind)
    chunks = x.chunk(parts)
    basis, products = top_subspace(Operator.of(chunks[0]), chunks[0].mean(0))
    for chunk in chunks[1:]:
        products = products + chunk.mT @ (chunk @ basis)
    pair = top_pair(basis, products)
    exact = torch.linalg.matrix_norm(x, 2).item() ** 2
    assert pair.value <= exact * (1 + 1e-12)
    assert pair.value >= exact * (1 - pair.error) * (1 - 1e-12)
    if parts == 1:
        assert pair.value == pytest.approx(exact, rel=0.01)
    assert torch.linalg.vector_norm(pair.vector).item() == pytest.approx(1)


def test_a_spike_takes_three_columns_and_a_flat_spectrum_a_krylov_space():
    sizes = {kind: top_subspace(Operator.of(inputs(kind)), inputs(kind).mean(0))[0].shape[1] for kind in ("spike", "flat")}
    assert sizes == {"spike": 3, "flat": 16}


def test_an_exhausted_krylov_space_is_exact():
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pair = top_pair(*top_subspace(Operator.of(x), x.mean(0)))
    assert pair.value == pytest.approx(torch.linalg.matrix_norm(x, 2).item() ** 2, rel=1e-12)


def test_a_zero_matrix_has_the_value_zero():
    assert top_pair(*top_subspace(Operator.of(torch.zeros(5, 3)), torch.ones(3))).value == 0


def test_a_start_along_an_eigenvector_that_is_not_the_top_one_is_left():
    x = torch.diag(torch.tensor([1.0, 3.0, 0.5, 0.1, 0.1, 0.2, 0.1], dtype=torch.float64))
    pair = top_pair(*top_subspace(Operator.of(x), torch.eye(7, 1, dtype=torch.float64)[:, 0]))
    assert pair.value == pytest.approx(9, rel=1e-2)
