"""Sharded parameters (FSDP2, tensor parallel): who holds what, and what is communicated.

A polar factor belongs to the whole matrix. With ``gather`` every rank collects the momentum of a sharded matrix (one
all-gather of the update per step), orthogonalises it and keeps its own part; the result is that of a single process. With
``shardwise`` each rank orthogonalises the rows or columns it holds and nothing is communicated; that is a different
optimizer, whose guarantee is weaker by the ratio of the shardwise to the full nuclear rank.

Nothing of this imports ``torch.distributed`` unless a parameter is sharded.
"""

import sys
from typing import Any, Literal

import torch
from torch import Tensor

Sharding = Literal["gather", "shardwise"]


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; asks nothing of ``torch.distributed`` if nobody has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: Tensor, sharding: Sharding) -> Tensor:
    """The matrix that is orthogonalised: all of it, or with ``shardwise`` the part on this rank."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    part: Tensor = sharded.full_tensor() if sharding == "gather" else sharded.to_local()
    return part


def part_of(direction: Tensor, like: Tensor, sharding: Sharding) -> Tensor:
    """The direction laid out as ``like``; the inverse of `whole`, without communication."""
    if not is_sharded(like):
        return direction
    from torch.distributed.tensor import DTensor, Replicate

    layout: Any = like
    if sharding == "shardwise":
        return DTensor.from_local(
            direction, layout.device_mesh, layout.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    replicated = DTensor.from_local(direction, layout.device_mesh, [Replicate()] * layout.device_mesh.ndim, run_check=False)
    return replicated.redistribute(placements=layout.placements)


def all_finite(grad: Tensor) -> Tensor:
    """Whether a gradient is finite, the same answer on every rank, as a tensor on the CPU."""
    if is_sharded(grad):
        sharded: Any = grad
        return torch.isfinite(sharded.full_tensor()).all().cpu()
    return torch.isfinite(grad).all().cpu()
