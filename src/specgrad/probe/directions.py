"""The two directions that are compared on each block, and whether a block was measured."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specgrad.linalg import polar_factor
from specgrad.probe.layers import Block, Layer, check_pattern
from specgrad.probe.objective import Backward, Objective


@dataclass
class Target:
    """A parameter that is moved: all its layers (two if it is tied), its gradient and its polar factors.

    Attributes:
        name: under which it is reported.
        layers: the layers that use it.
        euclidean: gradient of the mean loss, laid out like the parameter.
        spectral: in each block the polar factor of the gradient (for a gain its sign), laid out likewise.
        units: number of loss units behind the gradient.
        reached: whether the loss depends on the parameter at all.
    """

    name: str
    layers: list[Layer]
    euclidean: Tensor
    spectral: Tensor
    units: float
    reached: bool = True

    @property
    def layer(self) -> Layer:
        """The layer that says how the parameter is stored."""
        return self.layers[0]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Its matrices."""
        return self.layer.blocks

    def block_name(self, block: Block) -> str:
        """Name of a block in reports."""
        return f"{self.name}[{block.label}]" if block.label else self.name

    def slopes(self, block: Block) -> tuple[float, float]:
        """``<G, D>`` of the block's two directions: squared Frobenius norm and nuclear norm of its gradient."""
        g = self.layer.matrix(self.euclidean, block).double()
        return float(g.square().sum()), float((g * self.layer.matrix(self.spectral, block).double()).sum())


def chosen_layers(layers: list[Layer], pattern: str | None, gains: bool) -> list[list[Layer]]:
    """The layers to measure, those of one parameter together.

    Raises:
        ValueError: if the pattern is no regular expression or leaves none.
    """
    check_pattern(pattern)
    by_parameter: dict[int, list[Layer]] = {}
    for layer in layers:
        if (gains or layer.kind != "gain") and (pattern is None or re.search(pattern, layer.name)):
            by_parameter.setdefault(id(layer.weight), []).append(layer)
    if not by_parameter:
        raise ValueError(f"`pattern` must match at least one layer; got {pattern!r}, layers {[x.name for x in layers][:8]}.")
    return list(by_parameter.values())


def find_targets(chosen: list[list[Layer]], objective: Objective, backward: Backward | None = None) -> list[Target]:
    """The parameters to measure, with both directions.

    Args:
        chosen: as `chosen_layers` gives them.
        objective: the loss.
        backward: as in `Objective.gradients`.
    """
    sums, units = objective.gradients([group[0].weight for group in chosen], backward)
    found = []
    for group, total in zip(chosen, sums, strict=True):
        weight = group[0].weight.detach()
        gradient = torch.zeros_like(weight) if total is None else total / units
        gradient = gradient if gradient.dtype == torch.float64 else gradient.float()
        name = "+".join(x.name for x in group)
        found.append(Target(name, group, gradient, _spectral(group[0], gradient), units, total is not None))
    return found


def _spectral(layer: Layer, gradient: Tensor) -> Tensor:
    if layer.kind == "gain":
        return gradient.sign()
    out = torch.zeros_like(gradient)
    for block in layer.blocks:
        matrix = layer.matrix(gradient, block)
        # A contiguous block of a tensor and of its copy have the same layout, so that this writes into `out`.
        _write(layer, out, block, polar_factor(matrix, mode="strict"))
    return out


def _write(layer: Layer, tensor: Tensor, block: Block, matrix: Tensor) -> None:
    """Puts a block's matrix back into a tensor laid out like the parameter."""
    place = tensor[block.index] if block.index else tensor
    place.copy_((matrix.mT if layer.transposed else matrix).reshape(place.shape))


def only(layer: Layer, tensor: Tensor, block: Block) -> Tensor:
    """The tensor with everything outside the block set to zero."""
    if not block.index:
        return tensor
    out = torch.zeros_like(tensor)
    out[block.index] = tensor[block.index]
    return out


def undefined_reason(target: Target, slopes: tuple[float, float]) -> str:
    """Why a block has no directions; empty if it has."""
    if not target.reached:
        return "no gradient reaches it: it is not used on this batch, or inside a reentrant checkpoint"
    if not (slopes[0] > 0 and torch.tensor(slopes).isfinite().all()):
        return "its gradient is zero or not finite"
    return ""


def block_records(target: Target, step: int) -> Iterator[tuple[Block, tuple[float, float], dict[str, object]]]:
    """Each block with its slopes and what every record says about it."""
    for block in target.blocks:
        shape = target.layer.matrix(target.euclidean, block).shape
        slopes = target.slopes(block)
        yield (
            block,
            slopes,
            {
                "step": step, "layer": target.block_name(block), "kind": target.layer.kind, "rows": shape[0],
                "cols": shape[1] if len(shape) > 1 else 1, "parameter": target.layer.parameter,
                "reason": undefined_reason(target, slopes),
            },
        )  # fmt: skip
