"""How it is trained: one step, many steps with any update or optimizer, and the thresholded dynamics of the theory."""

import copy
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specgrad.memory.checkpoints import Checkpoint, Progress
from specgrad.memory.checks import Array, check_integer
from specgrad.memory.gradient import checked_frequencies, gradient_and_loss
from specgrad.memory.mean_field import Estimate, MeanFieldWarning, Method, estimate_gradient
from specgrad.memory.observables import capacity_of, distinct
from specgrad.memory.schedules import Schedule, fixed_rates, line_search
from specgrad.memory.scoring import recovered
from specgrad.memory.task import Task
from specgrad.memory.updates import Update, check_options, direction

# Where a step lowers the loss by a smaller share than this, or is Newton's, only exact losses show the best rate: the search
# is then exact, which costs no more than a few gradients.
_HARDLY = 1e-3

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
        lr: learning rate, > 0.
        step: which batch of `Task.sample`.
        options: settings of the update, see `specgrad.memory.direction`: ``method``, ``mode``, ``lam``, ...

    Returns:
        Float64, shape (d, d).

    Raises:
        ValueError: for an unknown update, settings out of range or of another update, or both ``frequencies`` and
            ``batch_size``.

    Cost: ``2 N d^2`` FLOPs and one d x d decomposition.

    Example:
        >>> task = Task(num_items=5000, dim=32, alpha=1.5)
        >>> [int(recovered(task, one_step(task, update)).sum()) for update in ("gd", "muon", "newton")]
        [4, 16, 21]

    Source: Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554), Theorems 4.1, 4.3 and 4.4.
    """
    check_options(update, options)
    if not 0 < lr < math.inf:
        raise ValueError(f"`lr` of `memory.one_step` must be finite and > 0; got {lr}.")
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
            ``relative_error``, ``polar_error``, ``sigma_ratio``, ``exact_rows`` and ``exact_columns`` (of the gradient, see
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
    columns: int | None = None,
    tolerance: float | int | None = None,
    with_loss: bool = False,
    checkpoint: str | Path | None = None,
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
        columns: exact columns of the approximate gradients; None is d for gradient descent and 0 elsewhere.
        tolerance: error of the polar factor that the hybrid gradient should reach.
        with_loss: whether the population loss after each step is computed, with the same method.
        checkpoint: file that keeps the finished steps, and is continued from if it exists, without changing a bit of the
            result; a run that was finished is read, or continued if ``steps`` has grown. It is written as steps end, as
            often as takes a twentieth of the time, and whenever the run stops, also by an exception.
        on_step: called after each step with the number of finished steps and the batch loss.
        should_stop: asked after each step; True, on any of several processes, ends the run early.
        options: settings of the update, see `specgrad.memory.direction`.

    Raises:
        ValueError: for a setting out of range or of another update, or a ``checkpoint`` of another run.
        FloatingPointError: if the weight overflows.

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
    check_run(steps, batch_size, momentum, weight_decay, gradient)
    check_options(update, options)
    adapter = _Adapter(task, update) if callable(update) else None
    if adapter is not None and (lr is not None or momentum or weight_decay):
        raise ValueError(
            "`lr`, `momentum` and `weight_decay` belong to the optimizer that `update` builds; leave them out here."
        )
    name = "optimizer" if callable(update) else update
    rates = fixed_rates(task, name, "line-search" if lr is None else lr, steps)
    if columns is None:
        columns = min(task.dim, task.num_outputs - 2) if name == "gd" and gradient != "exact" else 0
    if gradient != "exact" and name == "gd" and columns < min(task.dim, task.num_outputs - 2):
        warnings.warn(
            "Error estimates of approximate gradients are calibrated for Muon; for gradient descent errors can be 60 times "
            f"larger with columns={columns} below dim={task.dim}. Raise `columns`, or compare with gradient='exact'.",
            MeanFieldWarning,
            stacklevel=3,
        )

    def evaluate(weight: Tensor, q: Tensor) -> Estimate:
        return estimate_gradient(task, weight, q, gradient, rows=rows, columns=columns, tolerance=tolerance)

    keeper = None
    if checkpoint is not None:
        settings: dict[str, Any] = {
            "update": name,
            "line search": rates is None,
            "gradient": gradient,
            "batch_size": batch_size,
        }
        settings |= {"momentum": float(momentum), "weight_decay": float(weight_decay), "rows": rows, "columns": columns}
        settings |= {"tolerance": tolerance, "with_loss": with_loss, "options": sorted(options.items())}
        keeper = Checkpoint(task, Path(checkpoint), settings)
    run = (keeper.load() if keeper is not None else None) or Progress([], [], task.frequencies.new_zeros(task.dim, task.dim))
    _check_same_rates(run, rates)
    if adapter is not None:
        adapter.restore(run)
    weight = run.weights[-1] if run.weights else torch.zeros_like(run.buffer)
    began = time.process_time() - (run.records[-1]["seconds"] if run.records else 0.0)
    ahead: Estimate | None = None
    try:
        for step in range(len(run.records), steps):
            q = task.frequencies if batch_size is None else task.sample(batch_size, step)
            now = ahead if ahead is not None and batch_size is None else evaluate(weight, q)
            rate, buffer = math.nan, run.buffer
            if adapter is not None:
                weight = adapter.step(now.gradient)
            else:
                assert not callable(update)
                buffer = momentum * buffer + now.gradient
                along = direction(task, update, buffer, q, weight, **options) - weight_decay * weight
                hardly = gradient == "exact" and batch_size is None and bool(run.records)
                hardly = hardly and run.records[-1]["batch_loss"] - now.loss < _HARDLY * now.loss
                searched = task.num_items if name == "newton" or hardly else None
                rate = line_search(task, weight, along, q, searched) if rates is None else rates[step]
                weight = weight + rate * along
            if not weight.to(task.dtype).isfinite().all():
                raise FloatingPointError(f"The weight is not finite in {task.dtype} after step {step + 1}; lower `lr`.")
            ahead = evaluate(weight, task.frequencies) if with_loss else None
            record = _record(task, step, rate, now, q) | capacity_of(recovered(task, weight), task.frequencies)
            if ahead is not None:
                record["loss"] = ahead.loss
            # Only a whole step changes the progress, so that it can be kept whenever the run is interrupted.
            records = [*run.records, record | {"seconds": time.process_time() - began}]
            run = Progress(records, [*run.weights, weight], buffer, *(adapter.state() if adapter is not None else ()))
            if keeper is not None:
                keeper.save(run)
            if on_step is not None:
                on_step(step + 1, now.loss)
            if should_stop is not None and _any_process(task, should_stop()):
                break
    finally:
        if keeper is not None:
            keeper.save(run, now=True)
    return Run(run.records[:steps], run.weights[:steps])


def _any_process(task: Task, stop: bool) -> bool:
    """Whether one process wants to stop: all have to, or the others would wait for it."""
    votes = torch.tensor([int(stop)], device=task.frequencies.device)
    task.total(votes)
    return bool(votes)


def _check_same_rates(run: Progress, rates: list[float] | None) -> None:
    """Refuses a checkpoint whose steps were taken at other rates."""
    before = [record["learning_rate"] for record in run.records]
    if rates is not None and any(was != now for was, now in zip(before, rates, strict=False) if not math.isnan(was)):
        raise ValueError(
            f"`checkpoint` of `memory.simulate` must hold this run or not exist; its rates are {before}, now {rates}."
        )


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
        "exact_columns": now.exact_columns,
    }


class _Adapter:
    """W as a parameter that an optimizer of any library moves."""

    def __init__(self, task: Task, build: BuildOptimizer) -> None:
        zeros = torch.zeros(task.dim, task.dim, dtype=task.dtype, device=task.frequencies.device)
        self.weight = nn.Parameter(zeros)
        self.optimizer = build([self.weight])

    def step(self, gradient: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
        """Hands over minus G as the gradient, steps, and returns a copy of W."""
        self.weight.grad = (-gradient).to(self.weight)
        self.optimizer.step()
        return self.weight.detach().double().clone()

    def state(self) -> tuple[Float[Tensor, "d d"], dict[str, Any]]:
        """Copies of the parameter and of the optimizer's state."""
        return self.weight.detach().clone(), copy.deepcopy(self.optimizer.state_dict())

    def restore(self, run: Progress) -> None:
        """Continues from what `state` gave."""
        if run.parameter is not None and run.optimizer is not None:
            self.weight.copy_(run.parameter)
            self.optimizer.load_state_dict(run.optimizer)


def check_run(
    steps: int, batch_size: int | None, momentum: float | int = 0.0, weight_decay: float | int = 0.0,
    gradient: str = "exact",
) -> None:  # fmt: skip
    """Refuses settings out of range."""
    if gradient not in get_args(Method):
        raise ValueError(f"`gradient` of `memory.simulate` must be one of {', '.join(get_args(Method))}; got {gradient!r}.")
    check_integer("memory.simulate", "steps", steps)
    if batch_size is not None:
        check_integer("memory.simulate", "batch_size", batch_size)
    if steps < 1:
        raise ValueError(f"`steps` of `memory.simulate` must be >= 1; got {steps}.")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"`batch_size` of `memory.simulate` must be >= 1; got {batch_size}.")
    if not 0 <= momentum < 1:
        raise ValueError(f"`momentum` of `memory.simulate` must be in [0, 1); got {momentum}.")
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"`weight_decay` of `memory.simulate` must be finite and >= 0; got {weight_decay}.")
