"""What the optimizers refuse before any step: settings out of range, parameters that are no matrices."""

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from specgrad.optim.blocks import Blocks
from specgrad.optim.scaling import shape_factor

UPDATES = ("spectral", "sign", "adamw", "sgd")


def check_settings(group: dict[str, Any]) -> None:
    """Refuses settings of a parameter group that are out of range, by name and value."""
    for key in ("lr", "weight_decay"):
        if not (float(group[key]) >= 0 and math.isfinite(float(group[key]))):
            raise ValueError(f"`{key}` of a {group['update']} group must be finite and >= 0; got {group[key]}.")
    if group["update"] == "adamw":
        if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"`betas` of an adamw group must be two numbers in [0, 1); got {group['betas']}.")
        if not 0 <= group["eps"] < math.inf:
            raise ValueError(f"`eps` of an adamw group must be finite and >= 0; got {group['eps']}.")
        return
    if not 0 <= group["momentum"] < 1:
        raise ValueError(f"`momentum` must lie in [0, 1); got {group['momentum']}.")
    if group.get("momentum_style", "sum") not in ("ema", "sum"):
        raise ValueError(f"`momentum_style` must be ema or sum; got {group['momentum_style']!r}.")
    if group["update"] == "spectral":
        shape_factor(group["scale"], 1, 1)
        if group["update_clip"] is not None and not group["update_clip"] > 0:
            raise ValueError(f"`update_clip` must be None or > 0; got {group['update_clip']}.")


def check_parameter(name: str, parameter: Tensor, group: dict[str, Any]) -> None:
    """Refuses a parameter that the group's update cannot take, by name and with the way out."""
    if not parameter.dtype.is_floating_point:
        raise TypeError(f"Parameter {name} must be of a real floating dtype; got {parameter.dtype}. Freeze it instead.")
    if parameter.layout != torch.strided:
        raise TypeError(f"Parameter {name} must be dense; got layout {parameter.layout}.")
    if group["update"] != "spectral":
        return
    if parameter.numel() == 0:
        raise ValueError(f"Parameter {name} must not be empty for a spectral update; got shape {tuple(parameter.shape)}.")
    blocks = Blocks(**group["blocks"]) if group["blocks"] else Blocks()
    try:
        views = blocks.views(torch.empty(parameter.shape, device="meta"))
        _warn_of_tiny_clip(name, blocks, views, group)
    except ValueError as error:
        raise ValueError(
            f"Parameter {name} {error}. Declare its matrices by the group's `blocks`, for example "
            "Blocks(layout='flatten') for a convolution or Blocks(layout='batch') for stacked experts, give it to a group "
            'with update="adamw", or let `specgrad.optim.param_groups(model)` decide.'
        ) from None


def _warn_of_tiny_clip(name: str, blocks: Blocks, views: list[Tensor], group: dict[str, Any]) -> None:
    """A polar factor of full rank has root mean square ``1 / sqrt(max(rows, cols))``, which a clip should leave alone."""
    if group["update_clip"] is None:
        return
    rms = min(shape_factor(group["scale"], *blocks.outputs_and_inputs(v)) / max(v.shape[-2:]) ** 0.5 for v in views)
    if group["update_clip"] < 0.5 * rms:
        warnings.warn(
            f"`update_clip` {group['update_clip']:g} shortens every full-rank step of parameter {name}, whose root mean "
            f"square is {rms:.2g}, {rms / group['update_clip']:.0f}-fold; lower the learning rate instead.",
            stacklevel=5,
        )
