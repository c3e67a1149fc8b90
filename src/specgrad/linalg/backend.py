"""Which library multiplies and factorises matrices on the CPU."""

import os
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

Backend = Literal["auto", "torch", "scipy"]

# Blocks of rows of a Gram matrix, and the number of rows from which leaving out the upper ones pays.
_GRAM_BLOCKS, _GRAM_BLOCKS_FROM = 4, 192


def resolve_backend(backend: Backend, matrix: Tensor) -> Literal["torch", "scipy"]:
    """The library that ``backend`` stands for on a matrix.

    ``auto`` is ``scipy`` for float32 and float64 on the CPU where both PyTorch and, by OPENBLAS_NUM_THREADS or
    OMP_NUM_THREADS, SciPy run one thread, and ``torch`` otherwise: two pools of threads get in each other's way, at times
    twenty-fold.

    Raises:
        ValueError: for an unknown name, or ``scipy`` where the matrix is not on the CPU.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"`backend` must be one of {', '.join(get_args(Backend))}; got {backend!r}.")
    able = matrix.device.type == "cpu" and matrix.dtype in (torch.float32, torch.float64)
    if backend == "scipy" and not able:
        raise ValueError(f"`backend` must be torch for {matrix.dtype} on {matrix.device}; got 'scipy'.")
    return "scipy" if backend == "scipy" or (backend == "auto" and able and _one_thread()) else "torch"


def _one_thread() -> bool:
    return (
        torch.get_num_threads() == 1 and (os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")) == "1"
    )


def gram_of_rows(x: Float[Tensor, "*batch m n"]) -> Float[Tensor, "*batch m m"]:
    """``x x^T``; on a CPU only its blocks on and below the diagonal are multiplied."""
    rows = x.shape[-2]
    if x.device.type != "cpu" or rows < _GRAM_BLOCKS_FROM:
        return x @ x.mT
    gram = x.new_empty(*x.shape[:-2], rows, rows)
    block = -(-rows // _GRAM_BLOCKS)
    for begin in range(0, rows, block):
        end = min(begin + block, rows)
        gram[..., begin:end, :end] = x[..., begin:end, :] @ x[..., :end, :].mT
        gram[..., :begin, begin:end] = gram[..., begin:end, :begin].mT
    return gram


@cache
def bfloat16_pays(device: torch.device) -> bool:
    """Whether products of bfloat16 matrices are at least as fast as those of float32 on a device; measured once.

    On CPUs without bfloat16 instructions they are about thirty times slower, with them twice as fast, so the answer does
    not hang on the noise of one measurement. Accelerators are taken to be fast.
    """
    if device.type != "cpu":
        return True
    return min(_product_seconds(torch.bfloat16)) < 2 * min(_product_seconds(torch.float32))


def _product_seconds(dtype: torch.dtype) -> list[float]:
    matrix = torch.ones(192, 192, dtype=dtype)
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - began)
    return seconds


def exact_products(device: torch.device) -> AbstractContextManager[None]:
    """Context in which a user's autocast does not round the factors of matrix products."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        context: AbstractContextManager[None] = torch.autocast(device.type, enabled=False)
        return context
    return nullcontext()
