"""What each kind of layer sees: from the arguments of a module's call to the matrices that its weights multiply."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specgrad.probe.inputs import InputMatrix, Rows
from specgrad.probe.layers import Layer
from specgrad.probe.patches import Patches


@dataclass(frozen=True)
class Incoming:
    """One input matrix of a layer.

    Attributes:
        stream: which of the layer's inputs it is.
        tensor: the tensor it is made of, by which shared inputs are recognised; None if it is made anew.
        build: makes the matrix.
    """

    stream: int
    tensor: Tensor | None
    build: Callable[[], InputMatrix]


def incoming(
    layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor | None
) -> list[Incoming]:
    """The input matrices of one call of a module.

    Args:
        layer: the layer, not an embedding.
        module: the module that is called.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
        mask: True for the positions that count, or None; applied where the leading axes agree.
    """
    if layer.kind == "attention":
        return list(_attention(layer, module, args, kwargs, mask))
    if layer.kind == "experts":
        return list(_experts(layer, module, args, kwargs))
    x = args[0] if args else next(iter(kwargs.values()))
    if layer.kind == "convolution":
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        return [Incoming(g, x, lambda g=g: Patches(x, module, g)) for g in range(module.groups)]  # type: ignore[misc]
    if layer.kind == "gain":
        return [Incoming(0, None, lambda: Rows(masked(normalised(module, x), mask)))]
    return [Incoming(0, x, lambda: Rows(masked(x, mask)))]


def fits(x: Tensor, mask: Tensor) -> bool:
    """Whether a tensor's leading axes are the mask's."""
    return x.shape[: mask.ndim] == mask.shape


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """The positions that count."""
    if mask is not None and fits(x, mask):
        return x[mask.to(x.device)]
    return x


def normalised(module: nn.Module, x: Tensor) -> Tensor:
    """The hidden state that a norm's gain multiplies."""
    weight: Any = module.weight
    eps = next((getattr(module, n) for n in ("eps", "variance_epsilon", "epsilon") if getattr(module, n, None)), None)
    x = x.detach() if x.dtype == torch.float64 else x.detach().float()
    if "RMSNorm" in type(module).__name__:
        return F.rms_norm(x, tuple(weight.shape), None, eps)
    return F.layer_norm(x, tuple(weight.shape), None, None, 1e-5 if eps is None else eps)


def _attention(
    layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor | None
) -> Iterator[Incoming]:
    names = ("query", "key", "value")
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    for stream in sorted({block.stream for block in layer.blocks}):
        x = given[names[stream]]
        yield Incoming(stream, x, lambda x=x: Rows(masked(x, mask)))  # type: ignore[misc]


@torch.no_grad()
def _experts(layer: Layer, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Incoming]:
    """Tokens that each expert sees; the inputs of the output projection are computed once more."""
    given = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args, strict=False)) | kwargs
    hidden, index = given["hidden_states"].detach(), given["top_k_index"]
    hidden = hidden.reshape(-1, hidden.shape[-1])
    for expert in range(len(layer.weight)):
        rows = hidden[(index.reshape(len(hidden), -1) == expert).any(dim=1)]
        if layer.leaf == "down_proj" and len(rows):
            weight = module.gate_up_proj[expert].to(rows.dtype)
            bias = getattr(module, "gate_up_proj_bias", None)
            both = F.linear(rows, weight.mT if layer.transposed else weight, None if bias is None else bias[expert])
            gate = getattr(module, "_apply_gate", None)
            left, right = both.chunk(2, dim=-1)
            rows = gate(both) if gate is not None else module.act_fn(left) * right
        yield Incoming(expert, None, lambda rows=rows: Rows(rows))  # type: ignore[misc]
