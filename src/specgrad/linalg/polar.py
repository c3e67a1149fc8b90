"""`polar_factor`: the one door to every method that orthogonalises a matrix."""

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from specgrad.linalg.exact import polar_svd
from specgrad.linalg.zolotarev import polar_zolotarev

Method = Literal["auto", "zolotarev", "svd"]
Mode = Literal["fast", "robust", "strict"]

# Settings of each mode: (poles, left end of the interval): equioscillation errors 0.155 and 0.029.
ZOLOTAREV: dict[Mode, tuple[int, float]] = {"fast": (2, 2e-3), "robust": (4, 5e-4)}


@torch.no_grad()
def polar_factor(
    matrix: Float[Tensor, "*batch m n"], method: Method = "auto", mode: Mode = "fast"
) -> Float[Tensor, "*batch m n"]:
    """Polar factor ``U V^T`` of ``matrix = U S V^T``: the nearest partial isometry, and Muon's direction.

    Args:
        matrix: at least two axes, float dtype; every leading axis is a batch axis. Not modified.
        method: ``zolotarev`` (rational, Gram space), ``svd`` (float64 reference) or ``auto``, which takes ``svd`` for
            ``mode="strict"`` and ``zolotarev`` otherwise.
        mode: ``fast`` (singular values within 0.16 of 1 for relative size above 2e-3), ``robust`` (0.03, above 5e-4) or
            ``strict`` (float64). Half precision inputs are computed in float32.

    Returns:
        A tensor with the shape, dtype and device of ``matrix``. A zero matrix gives exact zeros. In a batch a non-finite
        matrix gives NaN and leaves the others as they would be alone.

    Raises:
        TypeError: if ``matrix`` is not of a real floating dtype.
        ValueError: if it has fewer than two axes, or ``method`` and ``mode`` are unknown or do not go together.

    Cost: see `polar_zolotarev`; ``svd`` about ten times more.

    Example:
        >>> polar_factor(torch.diag(torch.tensor([2.0, 0.0])), method="svd").tolist()
        [[1.0, 0.0], [0.0, 0.0]]

    Source: Davis and Drusvyatskiy (arXiv 2512.04299), section 1; Higham, Functions of Matrices (2008), chapter 8.
    """
    _check(matrix, method, mode)
    chosen = ("svd" if mode == "strict" else "zolotarev") if method == "auto" else method
    if chosen == "svd":
        return _finite_only(matrix)
    poles, interval = ZOLOTAREV[mode]
    working = matrix if matrix.dtype == torch.float64 else matrix.float()
    return polar_zolotarev(working, poles=poles, interval=interval).to(matrix.dtype)


def _finite_only(matrix: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
    """`polar_svd` with non-finite matrices set aside, since LAPACK refuses a whole batch for one of them."""
    finite = matrix.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    return torch.where(finite, polar_svd(torch.where(finite, matrix, 0)), torch.nan)


def _check(matrix: Tensor, method: str, mode: str) -> None:
    if not matrix.dtype.is_floating_point:
        raise TypeError(f"`matrix` of `polar_factor` must have a real floating dtype; got {matrix.dtype}.")
    if matrix.ndim < 2:
        raise ValueError(
            f"`matrix` of `polar_factor` must have at least two axes (batch, rows, columns); got shape "
            f"{tuple(matrix.shape)}. Reshape a vector to one row or one column."
        )
    for name, value, allowed in (("method", method, get_args(Method)), ("mode", mode, get_args(Mode))):
        if value not in allowed:
            raise ValueError(f"`{name}` of `polar_factor` must be one of {', '.join(allowed)}; got {value!r}.")
    if method == "zolotarev" and mode == "strict":
        raise ValueError("`mode` of `polar_factor` must be fast or robust with method 'zolotarev'; got 'strict'.")
