"""How it is trained: online SGD, or any optimizer, on fresh Gaussian tokens, several seeds at once."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from specgrad.aim.observables import measure_matrices, order_columns, overlap, word_moment, word_name
from specgrad.aim.ode import are_times
from specgrad.aim.scores import Batch, Model
from specgrad.aim.task import Task
from specgrad.runs.seeds import stream

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Guard = Literal["reject", "clip"]

# Scores are of order one; beyond this multiple of their first size a run is not coming back.
_DIVERGED = 1e3

# On an accelerator the size of the scores is looked at every so many steps, since each look waits for it.
_LOOK_EVERY = 16


def simulate(
    task: Task,
    *,
    lr: float,
    batch_size: int = 512,
    t_max: float | None = None,
    t_eval: Any = None,
    seeds: int | Iterable[int] = 1,
    optimizer: str | OptimizerFactory = "sgd",
    words: Sequence[Sequence[int]] = (),
    spectra: bool = False,
    guard: str | None = None,
    guard_level: float = 4.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    on_step: Callable[[int, float], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Trains the students on fresh samples and measures order parameters on the way.

    One step of SGD is ``W <- W - lr (mean gradient + (gamma/d) W)``. Time is ``t = 4 lr n/d`` for tied attention and
    ``tau = lr n/d`` for direct, n the number of steps, as in `specgrad.aim.solve`. SGD is stable while ``lr d`` times the
    typical second derivative of the loss stays well below ``2 batch_size``.

    Args:
        task: what is learned, with ``dim``.
        lr: learning rate of SGD; it also sets the unit of time for other optimizers.
        batch_size: samples per step.
        t_max: measure at 41 times from 0 to ``t_max``.
        t_eval: measure at these times instead, ascending, rounded to whole steps.
        seeds: number of seeds (0, 1, ...) or the seeds; a seed's run does not depend on which others run beside it.
        optimizer: ``sgd``, or a function from parameters to any optimizer, such as
            ``lambda params: specgrad.optim.Muon(params, lr=0.01)``; the gradient then includes ``(gamma/d) W``.
        words: words whose moments are measured, indices from 1: ``(1, 1, 2)`` gives a column ``mu112``.
        spectra: measure the eigenvalues of the symmetric part of each student, column ``spectrum1``, ...
        guard: None; ``reject`` drops samples with a score beyond ``guard_level log d``, as in the proof of the limit;
            ``clip`` scales the loss gradient in the scores down to that size where it is larger, which touches more samples
            (3 % with h3) and slows recovery.
        guard_level: see ``guard``.
        dtype: float32 or float64 of weights and samples; measurements are in float64.
        device: where it runs.
        on_step: called with finished steps and the batch loss at every measurement.
        should_stop: asked at every measurement; True ends the run there.

    Returns:
        ``t``, ``step``, ``samples`` (times); ``seeds``; the columns of `specgrad.aim.solve`, each (seeds, times), with
        ``loss`` the limiting population loss at the measured order parameters, ``batch_loss`` the mean over the last batch;
        words and spectra if asked for; ``rejected``, the share of samples that the guard touched.

    Raises:
        ValueError: for a setting out of range, or a task without ``dim``.
        FloatingPointError: when scores diverge, with the step, the seeds, their size and what helps.

    Example:
        >>> run = simulate(Task(dim=40, activation="h1"), lr=0.02, batch_size=64, t_max=0.1, seeds=2)
        >>> run["q12"].shape
        (2, 41)

    Cost: per step and seed, products of (batch_size L) x d with d x rank matrices: two for each trained index; one for each
    frozen matrix, or none where SGD runs in the eigenbasis of a single frozen one.

    Source: attention-indexed models, sections 3.1 and appendix E.
    """
    chosen = list(range(seeds)) if isinstance(seeds, int) else [int(s) for s in seeds]
    _check(task, lr, batch_size, chosen, guard, guard_level)
    if isinstance(optimizer, str) and optimizer != "sgd":
        raise ValueError(
            "`optimizer` of `aim.simulate` must be 'sgd' or a function from parameters to an optimizer, such as "
            f"`lambda params: specgrad.optim.Muon(params, lr=0.01)`; got {optimizer!r}."
        )
    if not all(word and all(k in range(1, task.indices + 1) for k in word) for word in words):
        raise ValueError(
            f"`words` of `aim.simulate` must hold tuples of indices from 1 to {task.indices}, as [(1, 1, 2)]; got {words!r}."
        )
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"`dtype` of `aim.simulate` must be torch.float32 or torch.float64; got {dtype}.")
    times = _measured_times(t_max, t_eval)
    assert task.dim is not None
    unit = (4.0 if task.attention == "tied" else 1.0) * lr / task.dim
    if times[-1] > 0 and np.rint(times[-1] / unit) < 1:
        raise ValueError(
            f"`t_max` or `t_eval` of `aim.simulate` must reach one step, {unit:.3g} at `lr` {lr:g}; got {times[-1]:g}."
        )
    steps = np.unique(np.rint(times / unit).astype(int))
    place = torch.device(device)
    model = Model.start(task, chosen, place, dtype, rotate=optimizer == "sgd")
    stepper = _sgd(model, lr) if isinstance(optimizer, str) else _with_optimizer(model, optimizer)
    level = guard_level * math.log(task.dim)
    generators = [stream(s, "samples", device=place) for s in chosen]
    batch = Batch(task, len(chosen), batch_size, place, dtype)
    rows: list[dict[str, np.ndarray]] = []
    touched, n = torch.zeros(len(chosen), device=place), 0
    losses = np.full(len(chosen), np.nan)
    limit: float | None = None
    for target in steps:
        while n < target:
            batch.draw(generators)
            scores = model.scores(batch)
            if n % _LOOK_EVERY == 0 or place.type == "cpu":
                told = partial(_advice, step=n, seeds=chosen, lr=lr, guard=guard, level=guard_level)
                limit = _look(scores, limit, told)
            loss, slope = model.loss_and_slope(scores)
            if guard is not None:
                touched += _apply_guard(slope, scores, guard, level)
            stepper(batch, slope)
            n += 1
            if n == target:
                losses = loss.mean(1).double().cpu().numpy()
        rows.append(_measure(model, words, spectra) | {"batch_loss": losses})
        if on_step is not None:
            on_step(n, float(np.mean(losses)))
        if should_stop is not None and should_stop():
            break
    done = steps[: len(rows)]
    columns = {name: np.stack([row[name] for row in rows], axis=1) for name in rows[0]}
    counts = {"t": done * unit, "step": done, "samples": done * batch_size, "seeds": np.array(chosen)}
    rejected = touched.double().cpu().numpy() / max(1, n * batch_size)
    return counts | columns | {"rejected": rejected, "lr": lr, "batch_size": batch_size}


def _check(task: Task, lr: float, batch_size: int, seeds: list[int], guard: str | None, guard_level: float) -> None:
    if task.dim is None:
        raise ValueError("`dim` of `aim.Task` must be given for `aim.simulate`; got None.")
    if not 0 < lr < math.inf:
        raise ValueError(f"`lr` of `aim.simulate` must be finite and > 0; got {lr}.")
    if not (isinstance(batch_size, Integral) and batch_size >= 1):
        raise ValueError(f"`batch_size` of `aim.simulate` must be an integer >= 1; got {batch_size!r}.")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"`seeds` of `aim.simulate` must be distinct and not empty; got {seeds}.")
    if guard is not None and guard not in get_args(Guard):
        raise ValueError(f"`guard` of `aim.simulate` must be None, 'reject' or 'clip'; got {guard!r}.")
    if not guard_level > 0:
        raise ValueError(f"`guard_level` of `aim.simulate` must be > 0; got {guard_level}.")


def _measured_times(t_max: float | None, t_eval: Any) -> np.ndarray:
    if (t_max is None) == (t_eval is None):
        raise ValueError("`t_max` or `t_eval` of `aim.simulate` must be given, and not both.")
    times = np.linspace(0.0, float(t_max), 41) if t_max is not None else np.atleast_1d(np.asarray(t_eval, dtype=float))
    if not are_times(times):
        got = t_eval if t_max is None else t_max
        raise ValueError(f"`t_max` (> 0) or `t_eval` of `aim.simulate` must give finite, ascending times >= 0; got {got}.")
    return times


def _look(scores: Tensor, limit: float | None, advice: Callable[[Tensor, float], str]) -> float:
    """Raises if scores are no longer of the order of the first ones; returns the limit."""
    largest = float(scores.abs().max())
    if limit is None and math.isfinite(largest):
        return _DIVERGED * max(1.0, largest)
    if limit is None or not largest <= limit:
        raise FloatingPointError(advice(scores, limit or 0.0))
    return limit


def _advice(scores: Tensor, limit: float, step: int, seeds: list[int], lr: float, guard: str | None, level: float) -> str:
    """What happened and what helps."""
    sizes = scores.flatten(1).abs().amax(1)
    gone = [seed for seed, size in zip(seeds, sizes.tolist(), strict=True) if not size <= limit]
    if guard is None:
        help_ = "set guard='clip', or guard='reject' with guard_level=1, which drops samples with |G| > guard_level log d"
    elif guard == "reject":
        help_ = f"lower `guard_level` ({level:g}; 1 held h3 at lr 0.04, batch 512 and d = 64), or set guard='clip'"
    else:
        help_ = f"lower `guard_level` ({level:g})"
    return (
        f"SGD diverged at step {step} for seeds {gone}: the largest score |G| is {float(sizes.max()):.3g} "
        f"(limit {limit:.3g}). Lower `lr` ({lr:g}), raise `batch_size`, or {help_}. "
        "Losses that grow fast, as with h3, need small steps."
    )


def _apply_guard(slope: Tensor, scores: Tensor, guard: str, level: float) -> Tensor:
    """Scales the loss gradients of samples with large scores, in place; how many it touched, per seed."""
    if guard == "reject":
        large = scores.flatten(2).abs().amax(2) > level
        slope.masked_fill_(large[:, :, None, None, None], 0.0)
    else:
        size = slope.flatten(2).abs().amax(2)
        large = size > level
        slope.mul_(torch.where(large, level / size, torch.ones_like(size))[:, :, None, None, None])
    return large.sum(1).to(torch.float32)


def _sgd(model: Model, lr: float) -> Callable[[Batch, Tensor], None]:
    def step(batch: Batch, slope: Tensor) -> None:
        model.descend(batch, slope, lr)

    return step


def _with_optimizer(model: Model, factory: OptimizerFactory) -> Callable[[Batch, Tensor], None]:
    """Any optimizer: one parameter per trained index and seed, each a view of the stacked weights."""
    parameters = {(k, s): nn.Parameter(w[s]) for k, w in model.trained.items() for s in range(len(w))}
    optimizer = factory(list(parameters.values()))

    def step(batch: Batch, slope: Tensor) -> None:
        gradients = model.gradients(batch, slope)
        for (k, s), parameter in parameters.items():
            parameter.grad = gradients[k][s]
        optimizer.step()

    return step


def _measure(model: Model, words: Sequence[Sequence[int]], spectra: bool) -> dict[str, np.ndarray]:
    """Observables of every seed, stacked along the first axis."""
    task, rows = model.task, []
    for s in range(model.seeds):
        matrices = model.matrices(s)
        traces, psi, omega = measure_matrices(matrices)
        direct = task.attention == "direct"
        row: dict[str, Any] = order_columns(traces, psi, omega if direct else None)
        row["overlap"] = overlap(row, task.students + 1)
        try:
            row["loss"] = task.potential.value(psi, omega if direct else None)
        except ValueError:  # a loss with kinks has no potential here
            row["loss"] = np.nan
        row |= {word_name(word): word_moment(matrices, word) for word in words}
        if spectra:
            for k in task.trained:
                symmetric = (matrices[k] + matrices[k].mT) / 2
                row[f"spectrum{k + 1}"] = torch.linalg.eigvalsh(symmetric).cpu().numpy()
        rows.append(row)
    return {name: np.stack([np.asarray(row[name], dtype=float) for row in rows]) for name in rows[0]}
