"""Polar factor by a composition of odd polynomials: products only, for accelerators and stacks of small matrices.

A wide matrix X, scaled so that its singular values lie in (0, 1], is mapped through one polynomial after the other,
``X <- (c_0 I + c_1 A + c_2 A^2 + ...) X`` with ``A = X X^T``; each pulls the singular values closer to 1. A stack of
matrices needs the same few batched products, whatever their number. Not to be confused with the classical
Newton-Schulz iteration, which repeats one cubic until convergence: the default polynomials differ from step to step.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from specgrad.linalg.checks import check_matrix
from specgrad.linalg.remez import OddPolynomial, optimal_composition

Normalisation = Literal["schatten8", "frobenius"]

# The best four quintics on [5e-3, 1]: singular values there land in 1 +- 0.098. The 2 % of safety keep what rounding to
# bfloat16 (0.4 %, amplified by the slopes) pushes over the right ends inside the fitted intervals. Past a right end
# each step throws a value further out: without safety sparse and low-rank inputs came back 1e2 to 1e12 times too large.
FOUR_QUINTICS = optimal_composition((5, 5, 5, 5), 5e-3, safety=1.02)

# The Schatten norm is taken of a Gram matrix rounded to the working dtype; this covers the rounding.
_SCHATTEN_SAFETY = 1.02

# On a CPU a stack is worked off in parts of this many entries: work space that fits the cache and that the allocator
# reuses instead of returning it to the system after each product saves up to 20 % in bfloat16 and 40 % in float32
# on stacks of 400 x 32 x 32 to 16 x 256 x 256; smaller parts lose more to the cost of a call.
_PART = 2**18

_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


@torch.no_grad()
def polar_newton_schulz(
    matrix: Float[Tensor, "*batch m n"],
    *,
    polynomials: tuple[OddPolynomial, ...] = FOUR_QUINTICS,
    dtype: torch.dtype | None = None,
    normalisation: Normalisation = "schatten8",
) -> Float[Tensor, "*batch m n"]:
    """Approximate polar factor by composed odd polynomials.

    ``U p_k(... p_1(S / bound)) V^T`` for ``matrix = U S V^T``, with ``bound`` >= S the norm named by ``normalisation``.

    Args:
        matrix: at least two axes, float dtype; every leading axis is a batch axis. Not modified.
        polynomials: in the order of application. The default four quintics leave relative singular values above about
            5e-3 of ``bound`` within 0.1 of 1, amplify none above 1.12 in any working dtype, and are linear below. In
            bfloat16 optimal compositions need a ``safety`` of 1.02 and degrees up to 5: larger coefficients of
            opposite sign do not survive the rounding.
        dtype: working dtype: bfloat16, float32 or float64. None takes float64 for a float64 input and bfloat16
            otherwise, which suits accelerators and CPUs with bfloat16 products; without them bfloat16 is very slow.
        normalisation: ``schatten8`` divides by ``|X X^T X X^T|_F^(1/4)``, which a first step of degree 5 has at hand and
            which exceeds the largest singular value by a factor 1.45 for a Gaussian 384 x 384 matrix; ``frobenius``
            divides by ``|X|_F`` (a factor 9.8), as Muon did.

    Returns:
        A tensor with the shape, dtype and device of ``matrix``. A zero matrix gives exact zeros. In a batch a non-finite
        matrix gives NaN and leaves the others as they would be without it.

    Raises:
        TypeError: if ``matrix`` is not of a real floating dtype.
        ValueError: if it has fewer than two axes, ``polynomials`` is empty, or ``dtype`` or ``normalisation`` is unknown.

    Cost: with short side m and long side n, about ``4 m^2 n + 2 (k - 2) m^3`` FLOPs per step of degree ``2k - 1`` and
    ``2 m n + 3 m^2`` numbers of work space per matrix, on a CPU for a part of the stack at a time. No branch depends on
    the data, so that an accelerator is never waited for.

    Example:
        >>> got = polar_newton_schulz(torch.diag(torch.tensor([2.0, 1.0, 0.0])), dtype=torch.float32)
        >>> [round(value, 2) for value in got.diagonal().tolist()]
        [1.08, 1.09, 0.0]

    Source: Jordan et al., Muon (2024); Amsel, Persson, Musco and Gower, The Polar Express (arXiv 2505.16932).
    """
    working = _check(matrix, polynomials, dtype, normalisation)
    if matrix.numel() == 0:
        return matrix.clone()
    tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if tall else matrix
    stack = wide.reshape(-1, *wide.shape[-2:])
    together = max(1, _PART // stack[0].numel()) if stack.device.type == "cpu" else len(stack)
    parts = [_composed(part, polynomials, working, normalisation) for part in stack.split(together)]
    y = (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(wide.shape)
    return y.mT if tall else y


def _composed(
    stack: Float[Tensor, "b m n"], polynomials: tuple[OddPolynomial, ...], dtype: torch.dtype, normalisation: Normalisation
) -> Float[Tensor, "b m n"]:
    """All steps on wide matrices, from and to the dtype of the input."""
    first, *rest = polynomials
    x = _first_step(_scaled(stack, dtype), first, normalisation)
    for polynomial in rest:
        x = _step(x, polynomial)
    return x.to(stack.dtype)


def _scaled(wide: Float[Tensor, "b m n"], dtype: torch.dtype) -> Float[Tensor, "b m n"]:
    """A contiguous copy in the working dtype whose largest entries are ``n^-1/2``, so that Gram matrices stay below 1.

    With entries of X X^T at most 1, no norm taken later over- or underflows. Rounding to ``dtype`` comes last: it would
    flush or overflow entries of extreme scale, and half precision has no room for the division.
    """
    source = wide.to(torch.promote_types(torch.promote_types(wide.dtype, dtype), torch.float32))
    largest = source.abs().amax(dim=(-2, -1), keepdim=True)
    divisor = (largest * wide.shape[-1] ** 0.5).clamp(max=torch.finfo(source.dtype).max)
    # Divided by NaN the whole matrix is NaN and stays so through every product.
    divisor = torch.where(largest.isfinite(), torch.where(largest > 0, divisor, 1), torch.nan)
    # Contiguous, so that a matrix and its transpose meet the same kernels and agree bit for bit. A conversion can lay out
    # anew in its own pass, but `to` ignores the wish when the dtype stays.
    return (source / divisor).to(dtype, memory_format=torch.contiguous_format).contiguous()


def _first_step(
    x: Float[Tensor, "b m n"], polynomial: OddPolynomial, normalisation: Normalisation
) -> Float[Tensor, "b m n"]:
    """Applies ``p(s X)`` with ``s`` the reciprocal of the norm, folded into the coefficients: ``c_j s^(2j+1)``.

    The Schatten-8 norm ``(sum_i S_i^8)^(1/8) = |A^2|_F^(1/4)`` costs one norm and one elementwise pass, because the step
    needs ``A = X X^T`` and ``A^2`` in any case; X itself is never rescaled.
    """
    gram = torch.bmm(x, x.mT)
    square = torch.bmm(gram, gram) if normalisation == "schatten8" or len(polynomial.coefficients) > 2 else gram
    powers = torch.linalg.vector_norm(square if normalisation == "schatten8" else x, dim=(-2, -1), keepdim=True)
    # Powers of s in bfloat16 would carry the rounding of s to the fifth; they are rounded once, at the end.
    powers = torch.where(powers > 0, powers, 1).to(torch.promote_types(x.dtype, torch.float32))
    s = powers**-0.25 / _SCHATTEN_SAFETY if normalisation == "schatten8" else 1 / powers
    weights = [(c * s ** (2 * j + 1)).to(x.dtype) for j, c in enumerate(polynomial.coefficients)]
    if len(weights) == 2:
        left = gram.mul_(weights[1])
    else:
        left = square.mul_(weights[-1]).addcmul_(gram, weights[-2])
        for weight in reversed(weights[1:-2]):
            left = torch.bmm(gram, _add_to_diagonal(left, weight))
    return torch.bmm(_add_to_diagonal(left, weights[0]), x)


def _step(x: Float[Tensor, "b m n"], polynomial: OddPolynomial) -> Float[Tensor, "b m n"]:
    """Applies ``p(X)`` by Horner's rule in ``A = X X^T``.

    The constant term goes to the diagonal of the left factor rather than through ``baddbmm(X, left, X, beta=c_0)``, which
    copies X first and, in bfloat16 on a CPU, raises the error on a rank-one 384 x 384 matrix from 0.37 to 0.51.
    """
    gram = torch.bmm(x, x.mT)
    *lower, top = polynomial.coefficients
    left = gram * top
    for coefficient in reversed(lower[1:]):
        left = torch.bmm(gram, _add_to_diagonal(left, coefficient))
    return torch.bmm(_add_to_diagonal(left, lower[0]), x)


def _add_to_diagonal(square: Float[Tensor, "b m m"], value: float | Float[Tensor, "b 1 1"]) -> Float[Tensor, "b m m"]:
    """Adds ``value`` times the identity, in place."""
    square.diagonal(dim1=-2, dim2=-1).add_(value if isinstance(value, float) else value[..., 0])
    return square


def _check(
    matrix: Tensor, polynomials: tuple[OddPolynomial, ...], dtype: torch.dtype | None, normalisation: str
) -> torch.dtype:
    """Refuses what cannot be computed; returns the working dtype."""
    check_matrix("polar_newton_schulz", matrix)
    if len(polynomials) == 0:
        raise ValueError("`polynomials` of `polar_newton_schulz` must hold at least one polynomial; got none.")
    if normalisation not in get_args(Normalisation):
        raise ValueError(
            f"`normalisation` of `polar_newton_schulz` must be one of {', '.join(get_args(Normalisation))}; "
            f"got {normalisation!r}."
        )
    working = (torch.float64 if matrix.dtype == torch.float64 else torch.bfloat16) if dtype is None else dtype
    if working not in _DTYPES:
        allowed = ", ".join(str(each).removeprefix("torch.") for each in _DTYPES)
        raise ValueError(f"`dtype` of `polar_newton_schulz` must be one of {allowed}; got {dtype}.")
    return working
