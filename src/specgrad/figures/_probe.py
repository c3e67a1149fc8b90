"""Small language models trained with a say of the probe: the loop behind the figures on its predictions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specgrad import gpt
from specgrad.gpt.model import Mlp
from specgrad.optim import Muon, param_groups
from specgrad.probe import Evidence

# Everything that measures; pages and advice are told from the records.
PROBE_CODE = tuple(
    f"specgrad.probe.{name}"
    for name in (
        "probe", "layers", "streams", "inputs", "patches", "gathering", "records", "gradients", "condition", "advantage",
        "directions", "gauss_newton", "gain", "likelihoods", "objective", "routing",
    )
)  # fmt: skip
CODE = ("specgrad.linalg", "specgrad.optim", "specgrad.gpt", *PROBE_CODE)


@dataclass(frozen=True)
class Side:
    """An adviser that sends every parameter to the side it is told.

    Attributes:
        spectral: identities of the parameters that take spectral steps.
    """

    spectral: frozenset[int] = frozenset()

    def evidence(self, parameter: Tensor) -> Evidence:
        """Overwhelming evidence for one side."""
        return Evidence(1e6 if id(parameter) in self.spectral else 1e-6, ())


def optimizer_of(model: gpt.Decoder, mlp: Mlp, adapt: Any = None, steps: int = 400) -> Muon:
    """Muon on the hidden matrices and AdamW on the rest at the tuned rates, able to change sides with ``adapt``.

    A hidden matrix with AdamW takes AdamW's rate, as in the runs that AdamW was tuned on.
    """
    adamw_lr, _ = gpt.tuned_rates("adamw", mlp)
    _, muon_lr = gpt.tuned_rates("muon", mlp)
    assert muon_lr is not None
    groups = param_groups(model)
    for group in groups:
        group["weight_decay"] = 0.0
    return Muon(groups, lr=muon_lr, adamw_lr=adamw_lr, adapt=adapt, adapt_every=steps + 1)


def train(
    task: gpt.Task,
    model: gpt.Decoder,
    optimizer: torch.optim.Optimizer,
    recipe: gpt.Recipe,
    before_step: Callable[[int, Tensor], None] | None = None,
    after_step: Callable[[int, float], None] | None = None,
    steps: int | None = None,
) -> None:
    """Trains by a recipe's schedule.

    Args:
        task: text and batches.
        model: its decoder.
        optimizer: at the full learning rates.
        recipe: schedule and length.
        before_step: called with step and batch before each forward pass.
        after_step: called with the number of finished steps and the training loss.
        steps: where to stop; default: the recipe's length.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for step in range(recipe.steps if steps is None else steps):
        batch = task.batch(step)
        if before_step is not None:
            before_step(step, batch)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * recipe.schedule(step)
        value = gpt.loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(step + 1, value.item())


def hidden_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Hidden matrices by layer name."""
    named = dict(model.named_parameters())
    names = [route.name for route in param_groups(model).routes if route.update == "spectral"]
    return {name.removesuffix(".weight"): named[name] for name in names}
