"""What the figures of attention-indexed models share: tasks, runs as records, colours."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from matplotlib.axes import Axes

from specgrad import aim
from specgrad.figures._figure import Check, Watch

PAPER = "xu2026"
CODE = ("specgrad.aim", "specgrad.figures._aim")

# Okabe and Ito's colours, as everywhere.
ACTIVATION_COLOURS = {"h1": "#0072B2", "h2": "#D55E00", "h3": "#009E73", "tanh": "#CC79A7", "softmax": "#56B4E9"}
QUANTITY_COLOURS = {"t1": "#009E73", "q11": "#0072B2", "q12": "#D55E00"}
QUANTITY_LABELS = {"t1": r"$t_1$", "q11": r"$q_{11}$", "q12": r"$q_{12}$"}
QUANTITIES = ("t1", "q11", "q12")


def tokens_of(activation: str) -> int:
    """Softmax needs a row of two tokens, every other activation one."""
    return 2 if activation == "softmax" else 1


def check_sizes(config: Any, *names: str) -> None:
    """Refuses settings of a figure that must be at least 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"`{name}` must be >= 1; got {getattr(config, name)}.")


def simulated(
    task: aim.Task, watch: Watch, *, lr: float, batch_size: int, t_eval: Sequence[float], seeds: Sequence[int],
    guard: str | None = None, guard_level: float = 4.0,
) -> dict[str, Any]:  # fmt: skip
    """A run in single precision that reports to ``watch`` and stops when it says so."""
    return aim.simulate(
        task, lr=lr, batch_size=batch_size, t_eval=t_eval, seeds=seeds, guard=guard, guard_level=guard_level,
        dtype=torch.float32, on_step=watch.finished,
    )  # fmt: skip


def rows_of(columns: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    """Records of a solution or run, with the order parameters alone."""
    kept = {"t", "seed", "step", "loss", "overlap"}
    return [
        {name: value for name, value in row.items() if name in kept or name in settings or name[0] in "tqpOP"}
        for row in aim.records(columns, **settings)
    ]


def mean_and_error(table: pl.DataFrame, column: str, over: str = "t") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean over seeds and its standard error (NaN for one seed), by ``over``."""
    grouped = table.group_by(over).agg(
        pl.col(column).mean().alias("mean"), (pl.col(column).std() / pl.len().sqrt()).alias("error")
    )  # fmt: skip
    sorted_rows = grouped.sort(over)
    return tuple(sorted_rows[name].to_numpy().astype(float) for name in (over, "mean", "error"))  # type: ignore[return-value]


def worst_deviation(run: pl.DataFrame, theory: pl.DataFrame, column: str) -> tuple[float, float]:
    """Largest distance between the seeds' mean and the theory at the run's times, and the standard error there.

    Both relative to the theory's largest value.
    """
    times, mean, error = mean_and_error(run, column)
    exact = theory.sort("t")
    curve = np.interp(times, exact["t"].to_numpy(), exact[column].to_numpy())
    scale = np.abs(curve).max()
    worst = int(np.argmax(np.abs(mean - curve)))
    return float(abs(mean[worst] - curve[worst]) / scale), float(np.nan_to_num(error[worst]) / scale)


def points(axes: Axes, run: pl.DataFrame, column: str, colour: str, marker: str, label: str | None = None) -> None:
    """Seeds' means as open markers with standard errors."""
    times, mean, error = mean_and_error(run, column)
    axes.errorbar(
        times, mean, yerr=np.nan_to_num(error), fmt=marker, color=colour, markersize=4, markerfacecolor="none", linewidth=1,
        label=label,
    )  # fmt: skip


def at_most(name: str, got: float, limit: float, tolerance: str = "none") -> Check:
    """A check that a number stays below a limit."""
    return Check(name, f"<= {limit:.3g}", tolerance, f"{got:.3g}", bool(got <= limit))
