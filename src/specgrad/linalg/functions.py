"""Odd functions of a matrix through its singular values, ``h(G) = U h(S) V^T``, and how they pass on a rank-one signal.

Not to be confused with functions of the eigenvalues, such as the matrix exponential: these maps take rectangular
matrices, and turning the rows or columns of G turns h(G) in the same way.

Everything is computed from a float64 SVD, except for polynomials, which need products alone. The eigenvectors of the
Gram matrix would be 1.3 to 3 times cheaper, but they resolve h_lambda only to about ``eps64 (s_1 / lam)^2`` where the
SVD reaches ``eps64 s_1 / lam``: at condition 1e8 and ``lam = 1e-8 s_1`` the errors are 3e-2 and 1e-9.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specgrad.linalg.checks import check_matrix, check_real
from specgrad.linalg.exact import svd_rank_tolerance

Elementwise = Callable[[Tensor], Tensor]

# Singular values closer than this, relative to the larger one, count as close: there a difference quotient has lost 3 of
# 16 digits. Five Gauss nodes leave a relative error of about ``(gap / (4 r))^10`` for an h' that is analytic within r of
# the interval: nothing for powers and h_lambda, where r is s itself, and 1e-12 for r = 4e-3 s, about the scale on which
# five composed quintics vary.
_CLOSE = 1e-3
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(5)


@torch.no_grad()
def h_lambda(matrix: Float[Tensor, "*#batch m n"], lam: float | Float[Tensor, "*#batch"]) -> Float[Tensor, "*#batch m n"]:
    """Regularised polar factor: singular values far above ``lam`` go to 1, those far below are divided by ``lam``.

    ``h_lam(G) = G (G^T G + lam^2 I)^(-1/2)``, on singular values ``s / sqrt(s^2 + lam^2)``.

    Args:
        matrix: at least two axes, float dtype; every leading axis is a batch axis. Not modified.
        lam: the resolution, in the unit of the singular values: one number, or a tensor that broadcasts against the
            batch axes (a sweep over one matrix costs one decomposition). At 0 this is `polar_svd`, which drops null
            directions; a positive value drops none, so that on a rank-deficient matrix the limit ``lam -> 0`` is reached
            only while ``lam`` is well above the rounding of the entries.

    Returns:
        A tensor of the dtype of ``matrix``, its batch axes broadcast with those of ``lam``. A zero matrix gives exact
        zeros. A non-finite matrix gives NaN and leaves the others alone. The error in operator norm is about
        ``eps64 s_1 / max(lam, s_min)`` plus the rounding to the dtype.

    Raises:
        TypeError: if ``matrix`` is not of a real floating dtype.
        ValueError: if it has fewer than two axes, or ``lam`` is negative, not finite or does not broadcast.

    Cost: about ``20 m^2 n`` float64 FLOPs for short side m.

    Example:
        >>> h_lambda(torch.tensor([[3.0]]), lam=4.0)
        tensor([[0.6000]])

    Source: Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554), the update of section 3; analysed in Theorem 4.1.
    """
    check_matrix("h_lambda", matrix)
    damping = _check_lam("h_lambda", lam, matrix.device)
    shape = _broadcast("h_lambda", matrix=matrix.shape[:-2], lam=damping.shape)
    if matrix.numel() == 0:
        return matrix.new_zeros(*shape, *matrix.shape[-2:])
    svd = _decompose(matrix)
    relative = damping[..., None] / svd.scale
    values = torch.where((damping[..., None] > 0) | svd.keep, svd.s / torch.hypot(svd.s, relative), 0)
    return _assemble(svd, values).to(matrix.dtype)


@torch.no_grad()
def spectral_function(
    matrix: Float[Tensor, "*batch m n"], function: Elementwise | Sequence[float]
) -> Float[Tensor, "*batch m n"]:
    """Applies an odd function to the singular values and keeps the singular vectors.

    ``h(G) = U_r h(S_r) V_r^T`` over the numerical range, or ``c_0 G + c_1 G G^T G + c_2 (G G^T)^2 G + ...``.

    Args:
        matrix: at least two axes, float dtype; every leading axis is a batch axis. Not modified.
        function: either h itself, called once with all singular values in float64 and acting on each alone, or the
            coefficients of x, x^3, x^5, ... A callable is taken as odd, whatever it does below zero: null directions
            are mapped to zero. One step of Newton-Schulz is ``(1.5, -0.5)`` or ``(3.4445, -4.7750, 2.0315)``.

    Returns:
        A tensor with the shape and dtype of ``matrix``. A zero matrix gives exact zeros; a non-finite one gives NaN and
        leaves the others alone.

    Raises:
        TypeError: if ``matrix`` is not of a real floating dtype, or ``function`` neither callable nor a sequence.
        ValueError: if ``matrix`` has fewer than two axes, there are no coefficients, or the callable changes the shape.

    Cost: for short side m about ``20 m^2 n`` float64 FLOPs; p coefficients ``4 m^2 n + 2 (p - 2) m^3``, without an SVD.

    Example:
        >>> spectral_function(torch.diag(torch.tensor([4.0, 9.0])), torch.sqrt).diagonal()
        tensor([2., 3.])
        >>> spectral_function(torch.tensor([[0.5]]), (1.5, -0.5))
        tensor([[0.6875]])

    Source: Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554), section 5.1; Higham, Functions of Matrices (2008), ch. 8.
    """
    check_matrix("spectral_function", matrix)
    if callable(function):
        if matrix.numel() == 0:
            return matrix.clone()
        svd = _decompose(matrix)
        values = _apply("function", function, "spectral_function", svd.s * svd.scale)
        return _assemble(svd, torch.where(svd.keep, values, 0)).to(matrix.dtype)
    if not isinstance(function, Sequence) or isinstance(function, str):
        raise TypeError(
            "`function` of `spectral_function` must be callable or a sequence of coefficients; "
            f"got {type(function).__name__}."
        )
    if len(function) == 0:
        raise ValueError("`function` of `spectral_function` must have at least one coefficient; got none.")
    finite = _finite(matrix)[..., None, None]
    result = _polynomial(torch.where(finite, matrix, 0).double(), [float(c) for c in function])
    return torch.where(finite, result, torch.nan).to(matrix.dtype)


@torch.no_grad()
def signal_derivative(
    matrix: Float[Tensor, "*#batch m n"],
    u: Float[Tensor, "*#batch m"],
    v: Float[Tensor, "*#batch n"],
    function: Elementwise,
    derivative: Elementwise,
) -> Float[Tensor, "*#batch"]:
    """How fast a spike ``q u v^T`` added to a matrix comes through an odd spectral function, at q = 0.

    ``d/dq u^T h(G + q u v^T) v``, by the Daleckii-Krein formula: with ``G = A S B^T``, ``a = A^T u`` and ``b = B^T v``,
    ``1/2 sum_{k<l} [(h_k + h_l)/(s_k + s_l) (a_k b_l - a_l b_k)^2 + (h_k - h_l)/(s_k - s_l) (a_k b_l + a_l b_k)^2]
    + sum_k h'_k a_k^2 b_k^2``. On a wide matrix the part of v outside the rows adds ``|v_out|^2 sum_k (h_k/s_k) a_k^2``,
    the limit of the sum with zero columns appended to S; on a tall one likewise with u.

    Args:
        matrix: the matrix G without the spike; for the derivative at another q, ``G + q u v^T``.
        u: left vector, one entry per row. Leading axes of the three broadcast: many pairs on one matrix cost one SVD.
        v: right vector, one entry per column.
        function: h on a float64 tensor of singular values of any shape, acting on each alone; odd, with h(0) = 0.
        derivative: h', likewise. Where singular values are close, it is integrated instead of dividing differences, for
            which h must be smooth on the scale of the singular value itself, as powers and h_lambda are.

    Returns:
        Float64, one number per matrix and pair; NaN where the matrix or a vector is not finite. Each divided difference is
        accurate to about ``1e-12 |h| / s``: where h is flat and u, v lie along one singular pair, trust the closed form of
        `h_lambda_derivative` instead.

    Raises:
        TypeError: if a tensor is not of a real floating dtype.
        ValueError: if ``matrix`` has fewer than two axes, sizes do not fit, or a callable changes the shape.

    Cost: one SVD and one m x m table per matrix (short side m), then ``5 m^2 + 4 m n`` FLOPs and ``O(m + n)`` memory a pair.

    Example:
        >>> signal_derivative(torch.tensor([[2.0]]), torch.ones(1), torch.ones(1), lambda s: s**3, lambda s: 3 * s**2).item()
        12.0

    Source: Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554), appendix A.1; the terms of rectangular matrices from the
    Frechet derivative of generalised matrix functions, Noferini, SIAM J. Matrix Anal. Appl. 38 (2017).
    """
    _check_signal("signal_derivative", matrix, u, v)
    shape = _broadcast("signal_derivative", matrix=matrix.shape[:-2], u=u.shape[:-1], v=v.shape[:-1])
    if matrix.numel() == 0:
        return torch.zeros(shape, dtype=torch.float64, device=matrix.device)
    svd = _decompose(matrix)
    s = svd.s * svd.scale
    h = _apply("function", function, "signal_derivative", s)
    at_zero = _apply("derivative", derivative, "signal_derivative", torch.zeros_like(s))
    ratios = torch.where(s > 0, h / s, at_zero)
    row, column = s[..., :, None], s[..., None, :]
    total = row + column
    sums = torch.where(total > 0, (h[..., :, None] + h[..., None, :]) / total, at_zero[..., None])
    gap = row - column
    close = gap.abs() <= _CLOSE * torch.maximum(row, column)
    mean = torch.zeros_like(gap)
    for node, weight in zip(_NODES.tolist(), _WEIGHTS.tolist(), strict=True):
        mean += weight / 2 * _apply("derivative", derivative, "signal_derivative", column + (1 + node) / 2 * gap)
    differences = torch.where(close, mean, (h[..., :, None] - h[..., None, :]) / gap)
    return _finite_only(svd, u, v, _contract(svd, u, v, sums, differences, ratios)).expand(shape)


@torch.no_grad()
def h_lambda_derivative(
    matrix: Float[Tensor, "*#batch m n"],
    u: Float[Tensor, "*#batch m"],
    v: Float[Tensor, "*#batch n"],
    lam: float | Float[Tensor, "*#batch"],
) -> Float[Tensor, "*#batch"]:
    """`signal_derivative` of `h_lambda`: the slope ``d/dq u^T h_lam(G + q u v^T) v`` at q = 0.

    The divided differences have a closed form that never subtracts: with ``r = sqrt(s^2 + lam^2)``, the product of
    ``(h_k + h_l)/(s_k + s_l)`` and ``(h_k - h_l)/(s_k - s_l)`` is ``(lam / (r_k r_l))^2``, also for coinciding values.

    Args:
        matrix: the matrix G without the spike; for the derivative at another q, ``G + q u v^T``.
        u: left vector, one entry per row. Leading axes of all arguments broadcast: many pairs on one matrix cost one SVD.
        v: right vector, one entry per column.
        lam: the resolution, in the unit of the singular values.

    Returns:
        Float64, one number per matrix and pair, never negative and at most ``|u|^2 |v|^2 / lam``; NaN where the matrix or
        a vector is not finite. At ``lam = 0`` infinite on a numerically rank-deficient matrix, where the polar factor jumps.

    Raises:
        TypeError: if a tensor is not of a real floating dtype.
        ValueError: if ``matrix`` has fewer than two axes, sizes do not fit, or ``lam`` is negative or not finite.

    Cost: as `signal_derivative`.

    Example:
        >>> h_lambda_derivative(torch.zeros(2, 2), torch.ones(2), torch.ones(2), lam=0.5).item()
        8.0

    Source: Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554), section 4.3 and appendix A.1.
    """
    name = "h_lambda_derivative"
    _check_signal(name, matrix, u, v)
    damping = _check_lam(name, lam, matrix.device)
    shape = _broadcast(name, matrix=matrix.shape[:-2], u=u.shape[:-1], v=v.shape[:-1], lam=damping.shape)
    if matrix.numel() == 0:
        return torch.zeros(shape, dtype=torch.float64, device=matrix.device)
    svd = _decompose(matrix)
    s, damping = svd.s * svd.scale, damping[..., None]
    r = torch.hypot(s, damping)
    h = torch.where(r > 0, s / r, 0)
    total = s[..., :, None] + s[..., None, :]
    sums = torch.where(total > 0, (h[..., :, None] + h[..., None, :]) / total, 1 / damping[..., None])
    differences = (damping[..., None] / r[..., :, None] / r[..., None, :]).square() / sums
    slope = _contract(svd, u, v, sums, differences, 1 / r)
    jumps = (damping[..., 0] == 0) & ~svd.keep.all(-1)
    return _finite_only(svd, u, v, torch.where(jumps, torch.inf, slope)).expand(shape)


class _Svd(NamedTuple):
    """Float64 decomposition of ``matrix / scale``, entries at most 1; zeros stand in for matrices that are not finite."""

    u: Float[Tensor, "*batch m k"]
    s: Float[Tensor, "*batch k"]
    vh: Float[Tensor, "*batch k n"]
    scale: Float[Tensor, "*batch 1"]
    keep: Bool[Tensor, "*batch k"]
    finite: Bool[Tensor, "*batch"]


def _finite(matrix: Float[Tensor, "*batch m n"]) -> Bool[Tensor, "*batch"]:
    return matrix.isfinite().all(dim=-1).all(dim=-1)


def _decompose(matrix: Float[Tensor, "*batch m n"]) -> _Svd:
    # LAPACK refuses a whole batch for one non-finite matrix; dividing by the largest entry avoids over- and underflow.
    finite = _finite(matrix)
    usable = torch.where(finite[..., None, None], matrix, 0).double()
    largest = usable.abs().amax(dim=(-2, -1))
    scale = torch.where(largest > 0, largest, 1)[..., None]
    u, s, vh = torch.linalg.svd(usable / scale[..., None], full_matrices=False)
    return _Svd(u, s, vh, scale, s > svd_rank_tolerance(matrix, s), finite)


def _assemble(svd: _Svd, values: Float[Tensor, "*#batch k"]) -> Float[Tensor, "*#batch m n"]:
    result = (svd.u * values[..., None, :]) @ svd.vh
    return torch.where(svd.finite[..., None, None], result, torch.nan)


def _polynomial(x: Float[Tensor, "*batch m n"], coefficients: list[float]) -> Float[Tensor, "*batch m n"]:
    """Horner's rule in the Gram matrix of the short side."""
    if len(coefficients) == 1:
        return coefficients[0] * x
    tall = x.shape[-2] > x.shape[-1]
    gram = x.mT @ x if tall else x @ x.mT
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    total = coefficients[-1] * gram + coefficients[-2] * eye
    for coefficient in reversed(coefficients[:-2]):
        total = total @ gram + coefficient * eye
    return x @ total if tall else total @ x


def _contract(
    svd: _Svd,
    u: Float[Tensor, "*#batch m"],
    v: Float[Tensor, "*#batch n"],
    sums: Float[Tensor, "*#batch k k"],
    differences: Float[Tensor, "*#batch k k"],
    ratios: Float[Tensor, "*#batch k"],
) -> Float[Tensor, "*#batch"]:
    """The sum of squares of `signal_derivative`, one row of the tables at a time.

    Written out, the squares would become two quadratic forms in ``a^2``, ``b^2`` and ``a b``, a few matrix products; but
    those cancel where the result is small, and all pairs at once would need a k x k table for each.
    """
    u, v = u.double(), v.double()
    a = (u[..., None, :] @ svd.u).squeeze(-2)
    b = (v[..., None, :] @ svd.vh.mT).squeeze(-2)
    slope = (differences.diagonal(dim1=-2, dim2=-1) * (a * b).square()).sum(-1)
    for k in range(svd.s.shape[-1] - 1):
        left, right = a[..., k : k + 1] * b[..., k + 1 :], a[..., k + 1 :] * b[..., k : k + 1]
        turning, stretching = (left - right).square(), (left + right).square()
        slope = slope + (sums[..., k, k + 1 :] * turning + differences[..., k, k + 1 :] * stretching).sum(-1) / 2
    rows, columns = svd.u.shape[-2], svd.vh.shape[-1]
    if columns > rows:
        outside = v - (b[..., None, :] @ svd.vh).squeeze(-2)
        slope = slope + (ratios * a.square()).sum(-1) * outside.square().sum(-1)
    elif rows > columns:
        outside = u - (a[..., None, :] @ svd.u.mT).squeeze(-2)
        slope = slope + (ratios * b.square()).sum(-1) * outside.square().sum(-1)
    return slope


def _finite_only(svd: _Svd, u: Tensor, v: Tensor, slope: Tensor) -> Tensor:
    return torch.where(svd.finite & u.isfinite().all(-1) & v.isfinite().all(-1), slope, torch.nan)


def _apply(argument: str, function: Elementwise, name: str, values: Tensor) -> Tensor:
    result = function(values)
    if not isinstance(result, Tensor) or result.shape != values.shape:
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(
            f"`{argument}` of `{name}` must return a tensor of the shape it is given, {tuple(values.shape)}; got {got}."
        )
    return result.double()


def _check_signal(name: str, matrix: Tensor, u: Tensor, v: Tensor) -> None:
    check_matrix(name, matrix)
    for argument, vector, size, side in (("u", u, matrix.shape[-2], "row"), ("v", v, matrix.shape[-1], "column")):
        check_real(name, argument, vector)
        if vector.ndim < 1 or vector.shape[-1] != size:
            raise ValueError(
                f"`{argument}` of `{name}` must have one entry per {side} of `matrix`, {size} on its last axis; "
                f"got shape {tuple(vector.shape)}."
            )


def _check_lam(name: str, lam: float | Tensor, device: torch.device) -> Tensor:
    damping = torch.as_tensor(lam, dtype=torch.float64, device=device)
    if not ((damping >= 0) & damping.isfinite()).all():
        raise ValueError(f"`lam` of `{name}` must be finite and >= 0, in the unit of the singular values; got {lam}.")
    return damping


def _broadcast(name: str, **batches: torch.Size) -> torch.Size:
    """The common shape of the batch axes of several arguments."""
    try:
        shape: torch.Size = torch.broadcast_shapes(*batches.values())
    except RuntimeError:
        got = ", ".join(f"{argument} {tuple(batch)}" for argument, batch in batches.items())
        raise ValueError(f"The batch axes of the arguments of `{name}` must broadcast; got {got}.") from None
    return shape
