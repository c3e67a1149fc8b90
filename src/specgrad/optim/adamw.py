"""AdamW on the parameters of one group, for everything in a model that is not a hidden matrix."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


def init_adamw_state(parameter: Tensor) -> dict[str, Tensor]:
    """State of AdamW before the first step: a step count and two moments shaped like the parameter."""
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def adamw_step(
    parameters: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]], group: dict[str, Any]
) -> None:
    """One step of PyTorch's AdamW on the given parameters, whose states are those of `init_adamw_state`.

    Source: Loshchilov and Hutter, Decoupled weight decay regularization (2019), algorithm 2.
    """
    adamw(
        parameters,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
