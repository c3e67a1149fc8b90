"""Statistics of all processes together: what a rank sees of the inputs and gradients is a part of the batch or the matrix.

Nothing of this imports ``torch.distributed`` unless the model is distributed.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def whole_matrices(model: nn.Module) -> Iterator[None]:
    """The model with whole matrices in place of those that ``fully_shard`` split, and without its hooks.

    Every rank gathers all of them, so that all must enter, and needs the memory of the whole model.

    Raises:
        ValueError: for parameters sharded in another way (tensor parallelism), whose modules expect shards.
    """
    module = sys.modules.get("torch.distributed.fsdp")
    parts: list[Any] = [] if module is None else [m for m in model.modules() if isinstance(m, module.FSDPModule)]
    for part in parts:
        part.reshard()
    gatherable = {
        id(parameter.sharded_param)
        for part in parts
        for group in _groups(part._get_fsdp_state())
        for parameter in group.fsdp_params
        if not parameter.is_dtensor
    }
    for name, parameter in model.named_parameters():
        if is_sharded(parameter) and id(parameter) not in gatherable:
            raise ValueError(
                f"`model` must hold whole matrices here, or be sharded by `fully_shard` alone; got the sharded parameter "
                f"{name}. Load the full state dict into a copy of the model that is not sharded, and measure there."
            )
    wholes: dict[int, nn.Parameter] = {}
    stores: list[dict[str, Any]] = [m._parameters for m in model.modules()] if gatherable else []
    before = [dict(store) for store in stores]
    hooks = [(m, m._forward_pre_hooks, m._forward_hooks) for m in model.modules()] if parts else []
    try:
        for owner, *found in hooks:
            for attribute, registered in zip(("_forward_pre_hooks", "_forward_hooks"), found, strict=True):
                kept = ((k, hook) for k, hook in registered.items() if not _of_fsdp(hook))
                setattr(owner, attribute, type(registered)(kept))
        for store in stores:
            for leaf, parameter in store.items():
                if id(parameter) in gatherable:
                    if id(parameter) not in wholes:
                        wholes[id(parameter)] = _gathered(parameter)
                    store[leaf] = wholes[id(parameter)]
        yield
    finally:
        for store, parameters in zip(stores, before, strict=True):
            store.update(parameters)
        for owner, pre, post in hooks:
            owner._forward_pre_hooks, owner._forward_hooks = pre, post


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # Earlier versions of PyTorch have one group, or none where a module has no parameters of its own.
    return [group for group in [state._fsdp_param_group] if group is not None]


def _of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def _gathered(parameter: Any) -> nn.Parameter:
    place = parameter.device_mesh.device_type
    there = parameter.detach() if parameter.device.type == place else parameter.detach().to(place)
    return nn.Parameter(there.full_tensor(), requires_grad=parameter.requires_grad)
