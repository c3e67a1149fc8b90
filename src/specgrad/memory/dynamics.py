"""How it is trained: one step, many steps with any update or optimizer, and the thresholded dynamics of the theory."""

import math
import pickle
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specgrad.memory.gradient import checked_frequencies, gradient_and_loss
from specgrad.memory.mean_field import Estimate, MeanFieldWarning, Method, estimate_gradient
from specgrad.memory.observables import capacity_of, distinct
from specgrad.memory.schedules import Schedule, fixed_rates, line_search
from specgrad.memory.scoring import recovered
from specgrad.memory.task import Array, Task
from specgrad.memory.updates import Update, direction
from specgrad.runs.files import atomic, set_aside

BuildOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@torch.no_grad()
def one_step(
    task: Task,
    update: Update | BuildOptimizer = "muon",
    frequencies: Array | None = None,
    batch_size: int | None = None,
    *,
    lr: float | int = 1.0,
    step: int = 0,
    **options: Any,
) -> Float[Tensor, "d d"]:
    """The weight after one step from W = 0, ``lr D(G_0)``; which items it recovers does not depend on ``lr``.

    Args:
        task: the task.
        update: ``gd``, ``muon``, ``h_lambda``, ``newton`` or ``whitened_muon``; or a function that builds an optimizer of
            `specgrad.optim` or ``torch.optim`` for a list of parameters, whose own learning rate then counts.
        frequencies: q, shape (N,); None is the population unless ``batch_size`` is given.
        batch_size: draws q as `Task.sample` does.
        lr: learning rate.
        step: which batch of `Task.sample`.
        options: settings of the update, see `specgrad.memory.direction`: ``method``, ``mode``, ``lam``, ...

    Returns:
        Float64, shape (d, d).

    Raises:
        ValueError: for an unknown update, settings out of range, or both ``frequencies`` and ``batch_size``.

    Cost: ``2 N d^2`` FLOPs and one d x d decomposition.

    Example:
        >>> task = Task(num_items=5000, dim=32, alpha=1.5)
        >>> [int(recovered(task, one_step(task, update)).sum()) for update in ("gd", "muon", "newton")]
        [4, 16, 21]

    Source: Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554), Theorems 4.1, 4.3 and 4.4.
    """
    if frequencies is not None and batch_size is not None:
        raise ValueError("`one_step` of `memory` takes `frequencies` or `batch_size`; got both.")
    q = checked_frequencies(task, frequencies) if batch_size is None else task.sample(batch_size, step)
    start, _ = gradient_and_loss(task, None, q)
    if callable(update):
        return _Adapter(task, update).step(start)
    return lr * direction(task, update, start, q, **options)


@dataclass(frozen=True)
class Run:
    """What a simulation did.

    Attributes:
        records: one per step, with ``step`` (from 1), ``learning_rate``, ``relative_rate`` (over ``sqrt(d)``),
            ``batch_loss`` (before the step, on its batch), ``gradient_norm``, ``distinct`` (items in the batch),
            ``relative_error``, ``polar_error``, ``sigma_ratio`` and ``exact_rows`` (of the gradient, see
            `specgrad.memory.Estimate`), the metrics of `specgrad.memory.capacity` after the step, ``loss`` (population
            loss after the step, if asked for) and ``seconds`` (CPU time of this process since the start).
        weights: W after each step.
    """

    records: list[dict[str, Any]]
    weights: list[Float[Tensor, "d d"]]

    @property
    def weight(self) -> Float[Tensor, "d d"]:
        """W after the last step."""
        return self.weights[-1]

    def column(self, name: str) -> list[Any]:
        """One entry of every record."""
        return [record[name] for record in self.records]


@torch.no_grad()
def simulate(
    task: Task,
    update: Update | BuildOptimizer = "muon",
    steps: int = 4,
    lr: Schedule | float | int | Sequence[float | int] | None = None,
    gradient: Method = "exact",
    batch_size: int | None = None,
    *,
    momentum: float | int = 0.0,
    weight_decay: float | int = 0.0,
    rows: int | None = None,
    tolerance: float | int | None = None,
    with_loss: bool = False,
    checkpoint: Path | None = None,
    on_step: Callable[[int, float], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    **options: Any,
) -> Run:
    """Trains from W = 0: ``W <- (1 - lr decay) W + lr D(M)``, ``M <- momentum M + G``.

    Args:
        task: the task; its seed fixes the batches.
        update: as of `one_step`; a built optimizer does momentum, decay and learning rate by itself.
        steps: number of steps.
        lr: one rate, one per step, or ``line-search`` (the default: the best rate along each direction), ``sqrt-dim``,
            ``2-1-1-1`` or ``theory``, see `specgrad.memory.fixed_rates`. None for a built optimizer.
        gradient: ``exact``; ``hybrid`` or ``mean-field``, at a cost linear in N, see `specgrad.memory.estimate_gradient`.
        batch_size: items per step, drawn afresh with replacement; None is the population gradient.
        momentum: factor of the old gradients.
        weight_decay: decoupled decay.
        rows: exact rows of the hybrid gradient.
        tolerance: error of the polar factor that the hybrid gradient should reach.
        with_loss: whether the population loss after each step is computed, with the same method.
        checkpoint: file in which every finished step is kept; a run with the same arguments goes on from there, and ends
            with the same bits.
        on_step: called after each step with the number of finished steps and the batch loss.
        should_stop: asked after each step; True ends the run early.
        options: settings of the update, see `specgrad.memory.direction`.

    Raises:
        ValueError: for a setting out of range.

    Warns:
        MeanFieldWarning: where an approximate gradient is not to be trusted.

    Cost: per step the gradient, ``4 D N d`` FLOPs exactly for D items with ``q_i > 0`` and ``24 N d^2`` as hybrid, and the
    scoring of `specgrad.memory.recovered`.

    Example:
        >>> run = simulate(Task(num_items=2000, dim=32, alpha=1.5), update="muon", steps=3)
        >>> run.column("count")[0] < run.column("count")[2]
        True

    Source: Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554), section 5.2 and Figures 4 and 5.
    """
    check_run(steps, batch_size, momentum, weight_decay)
    adapter = _Adapter(task, update) if callable(update) else None
    if adapter is not None and (lr is not None or momentum or weight_decay):
        raise ValueError(
            "`lr`, `momentum` and `weight_decay` belong to the optimizer that `update` builds; leave them out here."
        )
    name = "optimizer" if callable(update) else update
    rates = fixed_rates(task, name, "line-search" if lr is None else lr, steps)
    if gradient != "exact" and name == "gd":
        warnings.warn(
            "The error estimates of approximate gradients are calibrated for Muon; for gradient descent errors "
            "can be 20 times larger. Compare with gradient='exact' at a smaller size.",
            MeanFieldWarning,
            stacklevel=2,
        )

    def evaluate(weight: Tensor, q: Tensor) -> Estimate:
        return estimate_gradient(task, weight, q, gradient, rows=rows, tolerance=tolerance)

    weight = torch.zeros(task.dim, task.dim, dtype=torch.float64, device=task.frequencies.device)
    buffer = torch.zeros_like(weight)
    records: list[dict[str, Any]] = []
    weights: list[Tensor] = []
    if checkpoint is not None and checkpoint.exists():
        kept = _load(checkpoint, weight.device)
        if kept is not None:
            records, weights, buffer = kept["records"][:steps], kept["weights"][:steps], kept["buffer"]
            weight = weights[-1]
            if adapter is not None:
                adapter.load(kept["optimizer"], weight)
    began = time.process_time() - (records[-1]["seconds"] if records else 0.0)
    ahead: Estimate | None = None
    for step in range(len(records), steps):
        q = task.frequencies if batch_size is None else task.sample(batch_size, step)
        now = ahead if ahead is not None and batch_size is None else evaluate(weight, q)
        rate = math.nan
        if adapter is not None:
            weight = adapter.step(now.gradient)
        else:
            assert not callable(update)
            buffer = momentum * buffer + now.gradient
            along = direction(task, update, buffer, q, weight, **options) - weight_decay * weight
            rate = line_search(task, weight, along, q) if rates is None else rates[step]
            weight = weight + rate * along
        ahead = evaluate(weight, task.frequencies) if with_loss else None
        record = _record(task, step, rate, now, q) | capacity_of(recovered(task, weight), task.frequencies)
        if ahead is not None:
            record["loss"] = ahead.loss
        records.append(record | {"seconds": time.process_time() - began})
        weights.append(weight)
        if checkpoint is not None and task.rank_and_world[0] == 0:
            state = {"records": records, "weights": weights, "buffer": buffer}
            with atomic(checkpoint) as temporary:
                torch.save(state | {"optimizer": None if adapter is None else adapter.optimizer.state_dict()}, temporary)
        if on_step is not None:
            on_step(step + 1, now.loss)
        if should_stop is not None and should_stop():
            break
    return Run(records, weights)


def _record(task: Task, step: int, rate: float, now: Estimate, q: Tensor) -> dict[str, Any]:
    return {
        "step": step + 1,
        "learning_rate": rate,
        "relative_rate": rate / task.dim**0.5,
        "batch_loss": now.loss,
        "gradient_norm": float(now.gradient.norm()),
        "distinct": distinct(q),
        "relative_error": now.relative_error,
        "polar_error": now.polar_error,
        "sigma_ratio": now.sigma_ratio,
        "exact_rows": now.exact_rows,
    }


class _Adapter:
    """W as a parameter that an optimizer of any library moves."""

    def __init__(self, task: Task, build: BuildOptimizer) -> None:
        zeros = torch.zeros(task.dim, task.dim, dtype=task.dtype, device=task.frequencies.device)
        self.weight = nn.Parameter(zeros)
        self.optimizer = build([self.weight])

    def load(self, state: dict[str, Any], weight: Float[Tensor, "d d"]) -> None:
        """Goes on from a checkpoint."""
        self.weight.copy_(weight)
        self.optimizer.load_state_dict(state)

    def step(self, gradient: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
        """Hands over minus G as the gradient, steps, and returns a copy of W."""
        self.weight.grad = (-gradient).to(self.weight)
        self.optimizer.step()
        return self.weight.detach().double().clone()


def _load(checkpoint: Path, device: torch.device) -> dict[str, Any] | None:
    """What a checkpoint holds; a damaged one is set aside with a warning."""
    try:
        kept: dict[str, Any] = torch.load(checkpoint, map_location=device, weights_only=True)
        assert len(kept["records"]) == len(kept["weights"]) > 0
        return kept
    except (OSError, RuntimeError, KeyError, TypeError, EOFError, AssertionError, pickle.UnpicklingError) as error:
        set_aside(checkpoint, ValueError(str(error).splitlines()[0] if str(error) else type(error).__name__))
        return None


def check_run(steps: int, batch_size: int | None, momentum: float | int = 0.0, weight_decay: float | int = 0.0) -> None:
    """Refuses settings out of range."""
    if steps < 1:
        raise ValueError(f"`steps` of `memory.simulate` must be >= 1; got {steps}.")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"`batch_size` of `memory.simulate` must be >= 1; got {batch_size}.")
    if not 0 <= momentum < 1:
        raise ValueError(f"`momentum` of `memory.simulate` must be in [0, 1); got {momentum}.")
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"`weight_decay` of `memory.simulate` must be finite and >= 0; got {weight_decay}.")
