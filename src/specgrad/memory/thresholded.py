"""The thresholded dynamics that the multi-step theory analyses: no softmax, recovered items leave the gradient."""

import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from specgrad.memory import theory
from specgrad.memory.dynamics import Run, check_run
from specgrad.memory.gradient import uncentred_gradient
from specgrad.memory.observables import capacity_of, distinct
from specgrad.memory.schedules import Schedule, fixed_rates, line_search
from specgrad.memory.scoring import margins, recovered
from specgrad.memory.task import Task
from specgrad.memory.updates import check_options, direction

Drop = Literal["schedule", "prefix", "top90", "recovered"]


@torch.no_grad()
def simulate_thresholded(
    task: Task,
    steps: int = 4,
    lr: Schedule | float | int | Sequence[float | int] = "sqrt-dim",
    batch_size: int | None = None,
    *,
    update: Literal["gd", "muon", "h_lambda"] = "muon",
    drop: Drop = "schedule",
    constant: float | int = 0.05,
    margin: float | int = 0.0,
    **options: Any,
) -> Run:
    """The dynamics that the multi-step theory analyses: recovered items leave the gradient, the others see no softmax.

    ``W_{t+1} = W_t + lr D(sum_{i > d_t} q_i u_i v_i^T)`` with ``d_0 = 0``. No softmax is evaluated.

    Args:
        task: the task.
        steps: number of steps.
        lr: as of `simulate`.
        batch_size: as of `simulate`.
        update: ``muon`` (lambda = 0), ``h_lambda`` (pass ``lam``, or take `theory.resolution`) or ``gd``.
        drop: which items leave after step t. ``schedule``: the first ``constant d^(2 - (1 - 1/(2 alpha))^t)``; ``prefix``
            and ``top90``: the first so many as the metric of W_t says; ``recovered``: exactly the recovered ones. The
            last three keep an item whose margin is at most ``margin``.
        constant: constant of the schedule. 0.05 at dim >= 256; larger ones forget the most frequent items, because each
            step adds noise of the size of the first.
        margin: least ``gamma_ii - max_j gamma_ij``, in units of ``sqrt(d)``, of an item that leaves.
        options: settings of the update.

    Returns:
        The run; its records hold the metrics after each step and ``dropped``, the items that had left before it.
        Read ``top90``: ``count`` hides forgetting.

    Raises:
        ValueError: for a setting out of range, or ``schedule`` without ``alpha``.

    Cost: ``2 N d^2`` FLOPs a step and the scoring.

    Source: Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554), equation 10 and Theorem 5.4.
    """
    check_run(steps, batch_size)
    if update not in ("gd", "muon", "h_lambda"):
        raise ValueError(f"`update` of `memory.simulate_thresholded` must be gd, muon or h_lambda; got {update!r}.")
    check_options(update, options)
    if not 0 <= margin < float("inf"):
        raise ValueError(f"`margin` of `memory.simulate_thresholded` must be finite and >= 0; got {margin}.")
    if drop not in ("schedule", "prefix", "top90", "recovered"):
        raise ValueError(
            f"`drop` of `memory.simulate_thresholded` must be schedule, prefix, top90 or recovered; got {drop!r}."
        )
    if not 0 < constant < float("inf"):
        raise ValueError(f"`constant` of `memory.simulate_thresholded` must be finite and > 0; got {constant}.")
    if drop == "schedule" and task.alpha is None:
        raise ValueError("`drop`='schedule' of `memory.simulate_thresholded` needs `alpha` of the task; got None.")
    rates = fixed_rates(task, update, lr, steps)
    began = time.process_time()
    weight = torch.zeros(task.dim, task.dim, dtype=torch.float64, device=task.frequencies.device)
    gone = torch.zeros(task.num_items, dtype=torch.bool, device=weight.device)
    records: list[dict[str, Any]] = []
    weights: list[Tensor] = []
    for step in range(steps):
        q = task.frequencies if batch_size is None else task.sample(batch_size, step)
        kept = torch.where(gone, 0, q)
        total = uncentred_gradient(task, kept)
        along = direction(task, update, total, kept, **options)
        rate = line_search(task, weight, along, q) if rates is None else rates[step]
        weight = weight + rate * along
        mask = recovered(task, weight)
        metrics = capacity_of(mask, task.frequencies)
        records.append(
            {"step": step + 1, "learning_rate": rate, "relative_rate": rate / task.dim**0.5}
            | {"gradient_norm": float(total.norm()), "distinct": distinct(q), "dropped": int(gone.sum())}
            | metrics
            | {"seconds": time.process_time() - began}
        )
        weights.append(weight)
        gone = _left(task, drop, constant, margin, step + 1, weight, mask, metrics)
    return Run(records, weights)


def _left(
    task: Task,
    drop: Drop,
    constant: float | int,
    margin: float | int,
    step: int,
    weight: Tensor,
    mask: Tensor,
    metrics: dict[str, float | int],
) -> Tensor:
    """Items that leave the gradient after a step."""
    if drop == "schedule":
        assert task.alpha is not None
        gone = torch.zeros_like(mask)
        gone[: round(constant * task.dim ** theory.capacity_exponent("muon", task.alpha, step))] = True
        return gone
    gone = mask.clone()
    if drop != "recovered":
        gone[int(metrics[drop]) :] = False
    if margin > 0:
        items = gone.nonzero()[:, 0]
        gone[items] = margins(task, weight, items) > margin * task.dim**0.5
    return gone
