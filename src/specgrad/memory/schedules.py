"""Learning rates: fixed lists, the theory's orders, and the greedy line search that needs no knob."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from specgrad.memory import theory
from specgrad.memory.mean_field import mean_field_losses
from specgrad.memory.task import Task

Schedule = Literal["line-search", "sqrt-dim", "2-1-1-1", "theory"]

# Steps of equal norm are tried: for Muon the rate is sqrt(d) times these. Five factors of two to each side cover every
# optimum seen (0.35 to 2.8), and neighbours differ by less than moves the count.
_GRID = tuple(2.0 ** (k / 4) for k in range(-20, 21))


def fixed_rates(
    task: Task, update: str, schedule: Schedule | float | int | Sequence[float | int], steps: int
) -> list[float] | None:
    """Learning rates of every step; None for the line search.

    Args:
        task: the task.
        update: name of the update, for the theory's rates.
        schedule: one rate, one per step, or a name: ``sqrt-dim`` is ``sqrt(d)``; ``2-1-1-1`` the same with a first step
            of ``2 sqrt(d)``, after which every step learns something new where a first step of ``sqrt(d)`` leaves every
            item in the gradient; ``theory`` is ``d_{t+1}^alpha`` for gradient descent, ``1/sqrt(d)`` for Newton and
            ``sqrt(d)`` for the rest.
        steps: number of steps.

    Raises:
        ValueError: for an unknown name, a rate that is not positive, or too few rates.
    """
    if isinstance(schedule, str):
        if schedule not in get_args(Schedule):
            raise ValueError(
                f"`lr` of `memory.simulate` must be numbers or one of {', '.join(get_args(Schedule))}; got {schedule!r}."
            )
        if schedule == "line-search":
            return None
        root = task.dim**0.5
        if schedule == "sqrt-dim":
            return [root] * steps
        if schedule == "2-1-1-1":
            return [2 * root, *[root] * (steps - 1)][:steps]
        if update == "gd":
            if task.alpha is None:
                raise ValueError("`lr`='theory' of `memory.simulate` needs `alpha` of the task; got None.")
            return theory.gd_schedule(task.dim, task.alpha, steps)
        return [theory.learning_rate("newton" if update == "newton" else "muon", task.dim)] * steps
    rates = [float(schedule)] * steps if isinstance(schedule, int | float) else [float(rate) for rate in schedule]
    if len(rates) < steps:
        raise ValueError(f"`lr` of `memory.simulate` must have a rate for each of {steps} steps; got {len(rates)}.")
    if not all(0 < rate < float("inf") for rate in rates):
        raise ValueError(f"`lr` of `memory.simulate` must be finite and > 0; got {schedule}.")
    return rates[:steps]


@torch.no_grad()
def line_search(
    task: Task, weight: Float[Tensor, "d d"], direction: Float[Tensor, "d d"], frequencies: Float[Tensor, " N"]
) -> float:
    """The rate that lowers the loss most along a direction, on a grid with neighbours 19 % apart.

    The loss is the mean-field one, which needs two products for the whole grid; its error shifts the optimum far less
    than the grid does. For Muon it chooses about ``2.4 sqrt(d) / t``.

    Args:
        task: the task.
        weight: W.
        direction: D.
        frequencies: q of the batch.

    Returns:
        The best rate; the smallest of the grid if none lowers the loss.

    Cost: ``8 D d^2 + 400 D`` FLOPs for D items with ``q_i > 0``.

    Source: ours.
    """
    size = float(direction.norm())
    if size == 0:
        return 1.0
    # |polar factor|_F = sqrt(d), so that this is sqrt(d) for Muon.
    rates = torch.tensor(_GRID, dtype=torch.float64, device=direction.device) * (task.dim / size)
    losses = mean_field_losses(task, weight, direction, rates, frequencies)
    return float(rates[losses.nan_to_num(nan=torch.inf).argmin()])
