"""Checkpoints between conventions: momentum as a sum of gradients or as their average."""

import copy
from typing import Any

from specgrad.optim.spectral import MomentumStyle


def convert_momentum(
    state_dict: dict[str, Any], to: MomentumStyle, source: MomentumStyle | None = None, momentum: float | None = None
) -> dict[str, Any]:
    """A copy of an optimizer's state dict with its momentum in another convention.

    At constant decay b the average of gradients is ``(1 - b)`` times their discounted sum.

    Args:
        state_dict: of a `SpectralOptimizer`, ``torch.optim.Muon`` (``ema``) or another one with ``momentum_buffer``.
        to: convention wanted, ``ema`` or ``sum``.
        source: its convention; by default what its groups say.
        momentum: its decay; by default what its groups say.

    Returns:
        The converted copy; load it into an optimizer of that ``momentum_style``.

    Raises:
        ValueError: if a convention is unknown, or neither the groups nor the arguments tell convention and decay.

    Example:
        >>> import torch
        >>> saved = {"state": {0: {"momentum_buffer": torch.ones(1)}}, "param_groups": [{"params": [0], "momentum": 0.75}]}
        >>> convert_momentum(saved, "ema", source="sum")["state"][0]["momentum_buffer"].item()
        0.25
    """
    if to not in ("ema", "sum") or source not in (None, "ema", "sum"):
        raise ValueError(f"`to` and `source` of `convert_momentum` must be ema or sum; got {to!r} and {source!r}.")
    converted = copy.deepcopy(state_dict)
    for group in converted["param_groups"]:
        if group.get("update", "spectral") not in ("spectral", "sign"):
            continue  # PyTorch's SGD, which sgd groups follow, always sums
        style, decay = source or group.get("momentum_style"), group.get("momentum") if momentum is None else momentum
        if style is None or decay is None:
            raise ValueError(
                "`source` and `momentum` of `convert_momentum` must be given where the groups do not state them."
            )
        factor = 1.0 if style == to else (1 - decay if to == "ema" else 1 / (1 - decay))
        for key in group["params"]:
            if "momentum_buffer" in converted["state"].get(key, {}):
                converted["state"][key]["momentum_buffer"] *= factor
        group["momentum_style"] = to
    return converted
