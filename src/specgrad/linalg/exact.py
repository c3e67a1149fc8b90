"""Float64 references: every fast kernel is tested against a function of this file."""

import torch
from jaxtyping import Float
from torch import Tensor


def svd_rank_tolerance(
    matrix: Float[Tensor, "*batch m n"], singular_values: Float[Tensor, "*batch k"]
) -> Float[Tensor, "*batch 1"]:
    """Largest singular value that rounding alone can have produced.

    ``max(max(m, n) eps64 s_1, u |A|_F)`` with u the unit roundoff of the input's dtype: storing the entries perturbs A by
    at most ``u |A|_F`` in operator norm, and the float64 decomposition by about ``max(m, n) eps64 s_1``. Half precision
    inputs are taken as exact numbers and judged by the roundoff of float32.
    """
    unit = torch.finfo(matrix.dtype if matrix.dtype == torch.float64 else torch.float32).eps / 2
    computed = max(matrix.shape[-2:]) * torch.finfo(torch.float64).eps * singular_values[..., :1]
    return torch.maximum(computed, unit * torch.linalg.vector_norm(singular_values, dim=-1, keepdim=True))


def polar_svd(matrix: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
    """Polar factor by a float64 singular value decomposition: the reference for every other method.

    ``U_r V_r^T`` over the numerical range; null directions are mapped to zero, so that this is the partial isometry and
    not an arbitrary orthogonal completion.

    Args:
        matrix: any float dtype, any leading batch axes; must be finite.

    Returns:
        A tensor of the input's dtype.

    Cost: about ``20 m^2 n`` float64 FLOPs for short side m.

    Source: Higham, Functions of Matrices (2008), chapter 8.
    """
    if matrix.numel() == 0:
        return matrix.clone()
    scale = matrix.abs().amax(dim=(-2, -1), keepdim=True).double()
    u, s, vh = torch.linalg.svd(matrix.double() / torch.where(scale > 0, scale, 1), full_matrices=False)
    keep = s > svd_rank_tolerance(matrix, s)
    isometry: Tensor = (u * keep[..., None, :]) @ vh
    return isometry.to(matrix.dtype)
