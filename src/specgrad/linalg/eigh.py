"""Polar factors from eigenvectors of the Gram matrix, corrected to the accuracy of the working precision.

The eigenvectors of ``X X^T`` in float32 lose small singular values, because the Gram matrix carries an error of ``eps
s_1^2``. Two repairs make the result exact to rounding: a second eigenproblem inside the small subspace only, where the
error is relative to that subspace's own largest value, and a first-order correction for the rows that are still not
orthogonal.
"""

import numpy as np
import torch
from jaxtyping import Float
from scipy.linalg.blas import dsyrk
from scipy.linalg.lapack import dsyevd
from torch import Tensor

from specgrad.linalg.backend import Backend, gram_of_rows, resolve_backend
from specgrad.linalg.exact import polar_svd

# Rows below this share of the largest row norm are rotated again inside their own span, twice at most.
_SMALL = 0.05


def polar_eigh(matrix: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
    """Polar factor of one matrix by a two-stage eigendecomposition of the short side's Gram matrix.

    With ``X X^T = V diag(w) V^T``, rows ``W = V^T X`` of norms d are nearly orthogonal; to first order in
    ``S = offdiag(W W^T)`` of the normalised rows, ``polar(X) = V (I - K) W`` with ``K_ij = S_ij d_j / (d_i + d_j)``.
    Directions with ``d_i <= 2 eps sqrt(max(m, n)) max(d)`` are beyond the numerical range and mapped to zero.

    Args:
        matrix: one finite float32 or float64 matrix.

    Returns:
        A tensor like ``matrix``; error about 1e-5 at condition 1e3 in float32.

    Cost: ``6 m^2 n + 9 m^3`` FLOPs and more for a second stage, short side m.

    Source: first-order perturbation of the square root; Higham, Functions of Matrices (2008), chapters 6 and 8.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.mT if tall else matrix).contiguous()
    scale = x.abs().max()
    if not scale > 0:
        return torch.zeros_like(matrix)
    x = x / scale
    v = torch.linalg.eigh(gram_of_rows(x)).eigenvectors
    rows = v.mT @ x
    norms = torch.linalg.vector_norm(rows, dim=1)
    for power in (1, 2):
        small = int((norms < _SMALL**power * norms.max()).sum())
        if small < 2:
            break
        inner = torch.linalg.eigh(rows[:small] @ rows[:small].mT).eigenvectors
        rows[:small] = inner.mT @ rows[:small]
        v[:, :small] = v[:, :small] @ inner
        norms[:small] = torch.linalg.vector_norm(rows[:small], dim=1)
    keep = norms > 2 * torch.finfo(x.dtype).eps * max(x.shape) ** 0.5 * norms.max()
    if not keep.all():
        rows, norms, v = rows[keep], norms[keep], v[:, keep]
    rows = rows / norms[:, None]
    overlap = gram_of_rows(rows)
    overlap.diagonal().zero_()
    left = v - v @ (overlap * (norms / (norms[:, None] + norms)))
    result: Tensor = left @ rows
    return result.mT if tall else result


def polar_strict(matrix: Float[Tensor, "m n"], backend: Backend = "auto") -> Float[Tensor, "m n"]:
    """Polar factor of one matrix with float64 inside: ``V w^{-1/2} V^T X`` from a float64 Gram matrix.

    For float32 inputs the square root of the float64 roundoff is below the float32 one, so that the Gram matrix loses
    nothing; float64 inputs go to `polar_svd`.

    Args:
        matrix: one finite matrix of any float dtype.
        backend: library of the symmetric product and the eigenproblem on the CPU.

    Returns:
        A tensor of the input's dtype, exact to the rounding of a float32 input.

    Cost: ``4 m^2 n + 9 m^3`` float64 FLOPs for short side m.
    """
    if matrix.dtype == torch.float64:
        return polar_svd(matrix)
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.mT if tall else matrix).double().contiguous()
    scale = x.abs().max()
    if not scale > 0:
        return torch.zeros_like(matrix)
    x = x / scale
    w, v = _eigh_of_gram(x, backend)
    keep = w > max(x.shape) * torch.finfo(torch.float64).eps * w[-1]
    rows = (v[:, keep] * w[keep].rsqrt()).mT @ x
    result = v[:, keep].to(matrix.dtype) @ rows.to(matrix.dtype)
    return result.mT if tall else result


def _eigh_of_gram(x: Float[Tensor, "m n"], backend: Backend) -> tuple[Float[Tensor, " m"], Float[Tensor, "m m"]]:
    """Eigenvalues, ascending, and eigenvectors of ``x x^T`` in float64."""
    if resolve_backend(backend, x) == "torch":
        w, v = torch.linalg.eigh(gram_of_rows(x))
        return w, v
    # The transpose of a row-major matrix is column-major, which is what BLAS reads without a copy.
    values, vectors, info = dsyevd(dsyrk(1.0, x.numpy().T, trans=1, lower=1), lower=1, overwrite_a=1)
    if info != 0:
        raise np.linalg.LinAlgError(f"the symmetric eigenvalue problem did not converge (info {info})")
    return torch.from_numpy(values), torch.from_numpy(vectors)
