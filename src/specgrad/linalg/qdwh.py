"""The polar factor by QR-based dynamically weighted Halley iterations, for ill-conditioned matrices without an SVD."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from specgrad.linalg.exact import svd_rank_tolerance

# Weights above this make a Cholesky factorisation of I + c X^T X lose digits; QR takes over.
_CHOLESKY_UP_TO = 100.0
_MOST_STEPS = 12


def polar_qdwh(matrix: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
    """Polar factor by dynamically weighted Halley iterations in float64.

    ``X <- X (a I + b X^T X) (I + c X^T X)^-1`` with weights that follow the lower end of the spectrum; about six steps
    bring every singular value from the roundoff level to 1. Directions below the numerical range, which the iteration
    would bring to 1 as well, are removed by the small eigenvalues of ``H = X^T A``.

    Args:
        matrix: any float dtype, any leading batch axes; must be finite.

    Returns:
        A tensor of the input's dtype; null directions are mapped to zero.

    Cost: about ``50 m^2 n`` float64 FLOPs for short side m.

    Source: Nakatsukasa, Bai and Gygi, SIAM Journal on Matrix Analysis 31 (2010); Higham, Functions of Matrices (2008).
    """
    if matrix.numel() == 0:
        return matrix.clone()
    tall = matrix.shape[-2] >= matrix.shape[-1]
    a_matrix = (matrix if tall else matrix.mT).double()
    scale = a_matrix.abs().amax(dim=(-2, -1), keepdim=True)
    a_matrix = a_matrix / torch.where(scale > 0, scale, 1)
    # Holder's bound on the spectral norm, at most sqrt of the short side too large.
    bound = (a_matrix.abs().sum(-1).amax(-1) * a_matrix.abs().sum(-2).amax(-1)).sqrt()[..., None, None]
    x = a_matrix / torch.where(bound > 0, bound, 1)
    low = torch.finfo(torch.float64).eps / max(matrix.shape[-2:])
    for _ in range(_MOST_STEPS):
        if abs(1 - low) < 4 * torch.finfo(torch.float64).eps:
            break
        a, b, c = _weights(low)
        x = _halley(x, a, b, c)
        low = min(1.0, low * (a + b * low**2) / (1 + c * low**2))
    result = _on_numerical_range(x, a_matrix, matrix)
    return (result if tall else result.mT).to(matrix.dtype)


def _weights(low: float) -> tuple[float, float, float]:
    """Optimal weights when all singular values lie in ``[low, 1]`` (Nakatsukasa, Bai and Gygi, section 3.2)."""
    square = low**2
    d = (4 * max(0.0, 1 - square) / square**2) ** (1 / 3)
    a = math.sqrt(1 + d) + 0.5 * math.sqrt(8 - 4 * d + 8 * (2 - square) / (square * math.sqrt(1 + d)))
    b = (a - 1) ** 2 / 4
    return a, b, a + b - 1


def _halley(x: Float[Tensor, "*batch m n"], a: float, b: float, c: float) -> Float[Tensor, "*batch m n"]:
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand(*x.shape[:-2], -1, -1)
    if c > _CHOLESKY_UP_TO:
        q = torch.linalg.qr(torch.cat([math.sqrt(c) * x, eye], dim=-2)).Q
        top, bottom = q.split([x.shape[-2], x.shape[-1]], dim=-2)
        mixed: Tensor = (top @ bottom.mT) / math.sqrt(c)
    else:
        mixed = torch.cholesky_solve(x.mT, torch.linalg.cholesky(eye + c * (x.mT @ x))).mT
    return b / c * x + (a - b / c) * mixed


def _on_numerical_range(
    x: Float[Tensor, "*batch m n"], scaled: Float[Tensor, "*batch m n"], matrix: Float[Tensor, "*batch rows cols"]
) -> Float[Tensor, "*batch m n"]:
    """Removes the directions of the isometry ``x`` whose singular value in ``scaled`` is no more than rounding."""
    h = x.mT @ scaled
    values, vectors = torch.linalg.eigh((h + h.mT) / 2)
    keep = values > svd_rank_tolerance(matrix, values.abs().flip(-1))
    if keep.all():
        return x
    kept: Tensor = x @ (vectors * keep[..., None, :]) @ vectors.mT
    return kept
