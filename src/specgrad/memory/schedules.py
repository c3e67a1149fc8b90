"""Learning rates: fixed lists, the theory's orders, and the greedy line search that needs no knob."""

from collections.abc import Iterable, Sequence
from typing import Literal, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from specgrad.memory import theory
from specgrad.memory.mean_field import least_certain, losses_along
from specgrad.memory.task import Task

Schedule = Literal["line-search", "sqrt-dim", "2-1-1-1", "theory"]

# Steps of equal norm are tried: for Muon the rate is sqrt(d) times these. Five factors of two to each side cover every
# optimum seen (0.35 to 2.8), and neighbours differ by less than moves the count.
_GRID = tuple(2.0 ** (k / 4) for k in range(-20, 21))
_FINE_STEP = 1 / 4
_FINE = tuple(2.0 ** (_FINE_STEP * k) for k in range(-2, 3))

# The hybrid optimum of Muon lies within a factor of 1.5 of the mean-field one; the finer grid follows it if it lies further,
# by half a factor of two each time, as far as the coarse grid reaches: late steps of Newton begin at its lower end.
_MOVES = 20


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
    several = isinstance(schedule, Iterable) and getattr(schedule, "ndim", 1) == 1
    rates = [float(rate) for rate in cast(Sequence[float], schedule)] if several else [float(cast(float, schedule))] * steps
    if len(rates) < steps:
        raise ValueError(f"`lr` of `memory.simulate` must have a rate for each of {steps} steps; got {len(rates)}.")
    if not all(0 < rate < float("inf") for rate in rates):
        raise ValueError(f"`lr` of `memory.simulate` must be finite and > 0; got {schedule}.")
    return rates[:steps]


@torch.no_grad()
def line_search(
    task: Task,
    weight: Float[Tensor, "d d"],
    direction: Float[Tensor, "d d"],
    frequencies: Float[Tensor, " N"],
    rows: int | None = None,
) -> float:
    """The rate that lowers the loss most along a direction.

    A grid on the mean-field loss finds the neighbourhood, a finer one on the hybrid loss, with exact rows for the items of
    least certain mean field, the rate: the mean field alone exaggerates the losses of large steps. A parabola through the
    three best points ends the search. For Muon this gives about ``2.4 sqrt(d) / t`` in step t.

    Args:
        task: the task.
        weight: W.
        direction: D.
        frequencies: q of the batch.
        rows: exact rows of the second grid; None is d. All of them where the loss hardly changes, as in Newton's late steps.

    Returns:
        The best rate; the smallest of the grid if none lowers the loss.

    Cost: ``24 D d^2 + 400 D`` FLOPs for D items with ``q_i > 0``, and ``4 R N d + 30 R N`` for R exact rows.

    Source: ours.
    """
    size = float(direction.norm())
    if size == 0:
        return 1.0
    # |polar factor|_F = sqrt(d), so that this is sqrt(d) for Muon.
    coarse = torch.tensor(_GRID, dtype=torch.float64, device=direction.device) * (task.dim / size)
    losses = losses_along(task, weight, direction, coarse, frequencies)
    near = coarse[losses.nan_to_num(nan=torch.inf).argmin()]
    items = least_certain(task, weight + near * direction, frequencies, task.dim if rows is None else rows)
    for _ in range(_MOVES):
        fine = near * torch.tensor(_FINE, dtype=torch.float64, device=direction.device)
        losses = losses_along(task, weight, direction, fine, frequencies, items).nan_to_num(nan=torch.inf)
        best = int(losses.argmin())
        if 0 < best < len(fine) - 1:
            return float(fine[best]) * 2 ** (_FINE_STEP * _vertex(losses[best - 1 : best + 2].tolist()))
        near = fine[best]
    return float(near)


def _vertex(values: Sequence[float]) -> float:
    """Where a parabola through three equally spaced values is lowest, in steps from the middle one."""
    left, middle, right = values
    bend = left - 2 * middle + right
    return 0.5 * (left - right) / bend if bend > 0 else 0.0
