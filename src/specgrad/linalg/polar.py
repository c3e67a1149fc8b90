"""`polar_factor`: the one door to every method that orthogonalises a matrix."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from specgrad.linalg.backend import Backend, bfloat16_pays, exact_products, resolve_backend
from specgrad.linalg.checks import check_matrix
from specgrad.linalg.eigh import polar_eigh, polar_strict
from specgrad.linalg.exact import polar_svd
from specgrad.linalg.newton_schulz import polar_newton_schulz
from specgrad.linalg.qdwh import polar_qdwh
from specgrad.linalg.remez import optimal_composition
from specgrad.linalg.zolotarev import polar_zolotarev

Method = Literal["auto", "zolotarev", "newton_schulz", "eigh", "svd", "qdwh"]
Mode = Literal["fast", "robust", "exact", "strict"]

# Settings of each mode: (poles, left end of the interval): equioscillation errors 0.155 and 0.029.
ZOLOTAREV: dict[Mode, tuple[int, float]] = {"fast": (2, 2e-3), "robust": (4, 5e-4)}

# (degrees, left end of the interval, safety against rounding): largest errors 0.098 and 0.026.
NEWTON_SCHULZ: dict[Mode, tuple[tuple[int, ...], float, float]] = {
    "fast": ((5, 5, 5, 5), 5e-3, 1.02),
    "robust": ((5, 5, 5, 5, 5, 5), 5e-4, 1.02),
}

# On a CPU, products of many small matrices in one call beat their factorisations one by one: measured for at least this
# many matrices of at most this short side and below this aspect ratio.
_STACK_FROM, _STACK_SIDE, _STACK_ASPECT = 32, 128, 4

# Up to this short side float32 products of a stack cost no more than bfloat16 ones, and low-rank inputs do not leak.
_FLOAT32_SIDE = 32


@dataclass(frozen=True)
class Choice:
    """How a polar factor is computed.

    Attributes:
        method: the method, never ``auto``.
        mode: the accuracy asked for.
        dtype: the working dtype.
        backend: the library used on a CPU.
    """

    method: Method
    mode: Mode
    dtype: torch.dtype
    backend: Literal["torch", "scipy"]


@torch.no_grad()
def polar_factor(
    matrix: Float[Tensor, "*batch m n"],
    method: Method = "auto",
    mode: Mode = "fast",
    *,
    backend: Backend = "auto",
    dtype: torch.dtype | Literal["auto"] = "auto",
) -> Float[Tensor, "*batch m n"]:
    """Polar factor ``U V^T`` of ``matrix = U S V^T``: the nearest partial isometry, and Muon's direction.

    Args:
        matrix: at least two axes, float dtype; every leading axis is a batch axis. Not modified.
        method: ``zolotarev`` (rational, Gram space: the default on CPUs), ``newton_schulz`` (composed quintics: the default
            on accelerators and for stacks of small matrices), ``eigh`` (eigenvectors of the Gram matrix, corrected), ``svd``
            (float64 reference), ``qdwh`` (float64, for extreme conditions), or ``auto``; `choose_method` tells what it is.
        mode: ``fast`` (singular values within 0.16 of 1 for relative size above 2e-3), ``robust`` (0.03, above 5e-4),
            ``exact`` (float32 rounding, 2e-5 at condition 1e3) or ``strict`` (float64 inside). Methods with one accuracy
            ignore it.
        backend: library on the CPU: ``torch``, ``scipy`` or ``auto``.
        dtype: working dtype of ``newton_schulz`` (``auto``: bfloat16 where its products are fast) and ``zolotarev``
            (float32 or float64; ``auto``: that of the input, at least float32).

    Returns:
        A tensor with the shape, dtype and device of ``matrix``. A zero matrix gives exact zeros; exact methods map null
        directions to zero. In a batch a non-finite matrix gives NaN and leaves the others as they would be alone.

    Raises:
        TypeError: if ``matrix`` is not of a real floating dtype.
        ValueError: if it has fewer than two axes, or settings are unknown or do not go together.

    Cost: see the methods; with short side m and long side n, ``fast`` is about ``4 m^2 n + 4 m^3`` FLOPs.

    Example:
        >>> polar_factor(torch.diag(torch.tensor([2.0, 0.0])), mode="strict").tolist()
        [[1.0, 0.0], [0.0, 0.0]]

    Source: Davis and Drusvyatskiy (arXiv 2512.04299), section 1; Higham, Functions of Matrices (2008), chapter 8.
    """
    _check(matrix, method, mode, dtype)
    choice = choose_method(matrix, method, mode, backend=backend, dtype=dtype)
    if matrix.numel() == 0:
        return matrix.clone()
    with exact_products(matrix.device):
        return _computed(matrix, mode, choice)


def _computed(matrix: Float[Tensor, "*batch m n"], mode: Mode, choice: Choice) -> Float[Tensor, "*batch m n"]:
    if choice.method == "zolotarev":
        poles, interval = ZOLOTAREV[mode]
        working = matrix.to(choice.dtype)
        return polar_zolotarev(working, poles=poles, interval=interval, backend=choice.backend).to(matrix.dtype)
    if choice.method == "newton_schulz":
        return polar_newton_schulz(matrix, polynomials=optimal_composition(*NEWTON_SCHULZ[mode]), dtype=choice.dtype)
    if choice.method == "eigh":
        strict = mode == "strict"
        return _one_by_one(partial(polar_strict, backend=choice.backend) if strict else polar_eigh, matrix, choice)
    return _finite_only(polar_qdwh if choice.method == "qdwh" else polar_svd, matrix)


def choose_method(
    matrix: Float[Tensor, "*batch m n"],
    method: Method = "auto",
    mode: Mode = "fast",
    *,
    backend: Backend = "auto",
    dtype: torch.dtype | Literal["auto"] = "auto",
) -> Choice:
    """What `polar_factor` would do with the same arguments.

    Decided by shape, number of matrices, device, number of threads and one calibration per process; the matrix's entries
    are not looked at.

    Example:
        >>> choose_method(torch.zeros(256, 1024)).method, choose_method(torch.zeros(400, 32, 32)).method
        ('zolotarev', 'newton_schulz')
    """
    _check(matrix, method, mode, dtype)
    if method == "auto":
        if mode in ("exact", "strict"):
            method = "eigh"
        elif matrix.device.type != "cpu" or (matrix.dtype != torch.float64 and _is_stack_of_small(matrix.shape)):
            method = "newton_schulz"
        else:
            method = "zolotarev"
    if method in ("zolotarev", "newton_schulz") and mode not in ZOLOTAREV:
        raise ValueError(f"`mode` of `polar_factor` must be fast or robust with method {method!r}; got {mode!r}.")
    wide_dtype = matrix.dtype if matrix.dtype == torch.float64 else torch.float32
    if dtype == "auto":
        large = matrix.device.type != "cpu" or min(matrix.shape[-2:]) > _FLOAT32_SIDE
        half = method == "newton_schulz" and mode == "fast" and matrix.dtype != torch.float64 and large
        dtype = torch.bfloat16 if half and bfloat16_pays(matrix.device) else wide_dtype
    elif method == "zolotarev" and dtype not in (torch.float32, torch.float64):
        raise ValueError(f"`dtype` of `polar_factor` must be float32 or float64 with method 'zolotarev'; got {dtype}.")
    if method in ("svd", "qdwh"):
        dtype = torch.float64
    working = matrix.new_empty(0, dtype=dtype)
    with_scipy = method == "zolotarev" or (method == "eigh" and mode == "strict")
    return Choice(method, mode, dtype, resolve_backend(backend, working) if with_scipy else "torch")


def _is_stack_of_small(shape: Sequence[int]) -> bool:
    short, long = sorted(shape[-2:])
    count = 1
    for axis in shape[:-2]:
        count *= axis
    return count >= _STACK_FROM and short <= _STACK_SIDE and long < _STACK_ASPECT * max(short, 1)


def _one_by_one(
    kernel: Callable[[Tensor], Tensor], matrix: Float[Tensor, "*batch m n"], choice: Choice
) -> Float[Tensor, "*batch m n"]:
    """Applies a kernel for single matrices; the non-finite give NaN."""
    stack = matrix.to(choice.dtype).reshape(-1, *matrix.shape[-2:])
    results = [kernel(one) if one.isfinite().all() else torch.full_like(one, torch.nan) for one in stack]
    return torch.stack(results).reshape(matrix.shape).to(matrix.dtype)


def _finite_only(kernel: Callable[[Tensor], Tensor], matrix: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m n"]:
    """Applies a batched kernel with non-finite matrices set aside, since LAPACK refuses a whole batch for one of them."""
    finite = matrix.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    return torch.where(finite, kernel(torch.where(finite, matrix, 0)), torch.nan)


def _check(matrix: Tensor, method: str, mode: str, dtype: object) -> None:
    check_matrix("polar_factor", matrix)
    for name, value, allowed in (("method", method, get_args(Method)), ("mode", mode, get_args(Mode))):
        if value not in allowed:
            raise ValueError(f"`{name}` of `polar_factor` must be one of {', '.join(allowed)}; got {value!r}.")
    if dtype != "auto" and dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"`dtype` of `polar_factor` must be 'auto', bfloat16, float32 or float64; got {dtype}.")
