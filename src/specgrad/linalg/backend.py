"""Which library multiplies and factorises matrices on the CPU."""

from typing import Literal, get_args

import torch
from torch import Tensor

Backend = Literal["auto", "torch", "scipy"]


def resolve_backend(backend: Backend, matrix: Tensor) -> Literal["torch", "scipy"]:
    """The library that ``backend`` stands for on a matrix.

    ``auto`` is ``scipy`` for float32 and float64 on the CPU while PyTorch runs one thread, and ``torch`` otherwise: SciPy
    brings a pool of threads of its own, and two pools get in each other's way.

    Raises:
        ValueError: for an unknown name, or ``scipy`` where the matrix is not on the CPU.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"`backend` must be one of {', '.join(get_args(Backend))}; got {backend!r}.")
    able = matrix.device.type == "cpu" and matrix.dtype in (torch.float32, torch.float64)
    if backend == "scipy" and not able:
        raise ValueError(f"`backend` must be torch for {matrix.dtype} on {matrix.device}; got 'scipy'.")
    return "scipy" if backend == "scipy" or (backend == "auto" and able and torch.get_num_threads() == 1) else "torch"
