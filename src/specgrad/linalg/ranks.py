"""Norms and soft ranks of matrices, exact in float64.

A zero or non-finite matrix has no rank: the functions return NaN there, so that a caller can leave it out of a verdict.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from specgrad.linalg.backend import exact_products, gram_of_rows
from specgrad.linalg.checks import check_real


def singular_values(matrix: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch k"]:
    """Singular values in descending order, in float64; NaN for a non-finite matrix.

    Cost: about ``4 m^2 n`` float64 FLOPs for short side m.

    Example:
        >>> singular_values(torch.tensor([[0.0, 3.0], [1.0, 0.0]])).tolist()
        [3.0, 1.0]
    """
    return _values("singular_values", matrix)


@torch.no_grad()
def _values(function: str, matrix: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch k"]:
    check_real(function, "matrix", matrix)
    if matrix.ndim < 2 or 0 in matrix.shape[-2:]:
        raise ValueError(f"`matrix` of `{function}` must have two non-empty last axes; got shape {tuple(matrix.shape)}.")
    finite = matrix.isfinite().all(dim=-1).all(dim=-1)[..., None, None]
    values = torch.linalg.svdvals(torch.where(finite, matrix.double(), 0))
    return torch.where(finite[..., 0], values, torch.nan)


@torch.no_grad()
def gram_eigenvalues(gram: Float[Tensor, "*batch k k"]) -> Float[Tensor, "*batch k"]:
    """Eigenvalues of a positive semidefinite Gram matrix, descending, float64, rounding noise set to zero.

    Below ``k eps64`` times the largest, an eigenvalue of the Gram matrix is indistinguishable from zero; its square root
    would count as 1e-8 of the spectral norm in a nuclear norm.
    """
    finite = gram.isfinite().all(dim=-1).all(dim=-1)[..., None, None]
    values = torch.linalg.eigvalsh(torch.where(finite, gram.double(), 0)).flip(-1)
    noise = gram.shape[-1] * torch.finfo(torch.float64).eps * values[..., :1]
    return torch.where(finite[..., 0], torch.where(values > noise, values, 0), torch.nan)


@torch.no_grad()
def short_gram(matrix: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch k k"]:
    """Gram matrix of the shorter side, in float64."""
    wide = (matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix).double()
    with exact_products(matrix.device):
        return gram_of_rows(wide)


def spectral_norm(matrix: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch"]:
    """Largest singular value, float64."""
    return _values("spectral_norm", matrix)[..., 0]


def nuclear_norm(matrix: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch"]:
    """Sum of the singular values, float64."""
    return _values("nuclear_norm", matrix).sum(-1)


def stable_rank(matrix: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch"]:
    """Stable rank ``|A|_F^2 / |A|_op^2``, between 1 and the rank; the same for a matrix and its transpose.

    Args:
        matrix: for a layer's inputs, tokens x features or features x tokens.

    Returns:
        Float64; NaN for a zero or non-finite matrix.

    Raises:
        TypeError: if the dtype is not real floating.
        ValueError: if a matrix axis is missing or empty.

    Example:
        >>> stable_rank(torch.eye(5)).item()
        5.0

    Source: Davis and Drusvyatskiy (arXiv 2512.04299), section 1.
    """
    return stable_rank_of_squares(_relative(_values("stable_rank", matrix)).square())


def nuclear_rank(matrix: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch"]:
    """Nuclear rank ``|G|_*^2 / |G|_F^2``, between 1 and the rank.

    Both norms are squared: it is this ratio, not its root, that is compared with the stable rank of the inputs.

    Args:
        matrix: for a layer, the gradient of its weight.

    Returns:
        Float64; NaN for a zero or non-finite matrix.

    Raises:
        TypeError: if the dtype is not real floating.
        ValueError: if a matrix axis is missing or empty.

    Example:
        >>> round(nuclear_rank(torch.diag(torch.tensor([2.0, 1.0]))).item(), 4)
        1.8

    Source: Davis and Drusvyatskiy (arXiv 2512.04299), section 1.
    """
    return nuclear_rank_of_squares(_relative(_values("nuclear_rank", matrix)).square())


def _relative(values: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:
    """Singular values over the largest, whose squares neither over- nor underflow; NaN for a zero matrix."""
    return values / values[..., :1]


def stable_rank_of_squares(squares: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
    """Stable rank from squared singular values in descending order, such as those of `gram_eigenvalues`."""
    return (squares / squares[..., :1]).sum(-1)


def nuclear_rank_of_squares(squares: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch"]:
    """Nuclear rank from squared singular values, such as those of `gram_eigenvalues`."""
    relative = squares / squares[..., :1]
    return relative.sqrt().sum(-1).square() / relative.sum(-1)
