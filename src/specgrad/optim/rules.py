"""Updates of parameters that are not hidden matrices, computed by PyTorch's own functional optimizers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd


def init_adamw(parameter: Tensor) -> dict[str, Tensor]:
    """State of AdamW before the first step: a step count and two moments shaped like the parameter."""
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def step_adamw(parameters: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]) -> None:
    """One step of AdamW: Loshchilov and Hutter, Decoupled weight decay regularization (2019), algorithm 2."""
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


def init_sgd(parameter: Tensor) -> dict[str, Tensor]:
    """State of gradient descent with momentum before the first step."""
    return {"momentum_buffer": torch.zeros_like(parameter)}


def step_sgd(parameters: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]], group: dict[str, Any]) -> None:
    """One step of gradient descent with momentum and decoupled weight decay."""
    torch._foreach_mul_(parameters, 1 - float(group["lr"]) * group["weight_decay"])
    sgd(
        parameters,
        grads,
        [state["momentum_buffer"] for state in states],
        weight_decay=0.0,
        momentum=group["momentum"],
        lr=float(group["lr"]),
        dampening=0.0,
        nesterov=group["nesterov"] and group["momentum"] > 0,
        maximize=False,
    )


SCALAR_RULES: dict[str, tuple[Callable[[Tensor], dict[str, Tensor]], Callable[..., None]]] = {
    "adamw": (init_adamw, step_adamw),
    "sgd": (init_sgd, step_sgd),
}
