"""Statistics of all processes together: what a rank sees of the inputs and gradients is a part of the batch or the matrix.

Nothing of this imports ``torch.distributed`` unless the model is distributed.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from specgrad.optim.sharding import is_sharded
from specgrad.probe.inputs import InputStatistics, TokenCounts


def process_group(model: nn.Module) -> Any | None:
    """The group over which a DistributedDataParallel or fully sharded model splits its batch; None for one process."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is not None and isinstance(model, parallel.DistributedDataParallel):
        return model.process_group
    for parameter in model.parameters():
        if is_sharded(parameter):
            mesh = parameter.device_mesh  # type: ignore[attr-defined]
            if mesh.ndim == 1:
                return mesh.get_group()
            return torch.distributed.group.WORLD
    return None


def reduce_inputs(found: InputStatistics | None, features: int, group: Any, device: torch.device) -> InputStatistics:
    """Sums the statistics of all ranks; a rank that saw nothing takes part with zeros."""
    mine = found if found is not None and found.tokens else None
    flat = torch.zeros(2 + features + features * features, dtype=torch.float64, device=device)
    if mine is not None:
        assert mine.total is not None and mine.gram is not None
        flat[0], flat[1] = mine.tokens, mine.squares
        flat[2 : 2 + features], flat[2 + features :] = mine.total, mine.gram.reshape(-1)
    largest = torch.as_tensor(0.0 if mine is None else mine.largest, dtype=torch.float64, device=device).reshape(1).clone()
    torch.distributed.all_reduce(flat, group=group)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    gram = flat[2 + features :].reshape(features, features)
    return InputStatistics(int(flat[0]), flat[1], flat[2 : 2 + features], largest[0], None, gram, parts=[id(gram)])


def reduce_counts(found: TokenCounts | None, vocabulary: int, group: Any, device: torch.device) -> TokenCounts:
    """Sums the token counts of all ranks."""
    counts = torch.zeros(vocabulary, dtype=torch.int64, device=device) if found is None else found.counts.to(device).clone()
    torch.distributed.all_reduce(counts, group=group)
    return TokenCounts(counts.cpu())


def reduce_gradient(gradient: Tensor | None, weight: Tensor, group: Any) -> Tensor | None:
    """The gradient of the whole batch and the whole matrix; None if no rank has one."""
    if gradient is not None and is_sharded(gradient):
        full: Tensor = gradient.full_tensor()  # type: ignore[attr-defined]
        return full
    if is_sharded(weight):
        return None
    mine = torch.zeros_like(weight, dtype=torch.float32) if gradient is None else gradient.float().clone()
    counted = torch.tensor([float(gradient is not None)], device=mine.device)
    torch.distributed.all_reduce(mine, group=group)
    torch.distributed.all_reduce(counted, group=group)
    return mine / torch.distributed.get_world_size(group) if counted.item() else None
