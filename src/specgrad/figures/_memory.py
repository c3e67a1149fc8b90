"""What the figures on associative memory share: settings, fits of exponents, checks and drawing of means."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator

from specgrad import memory
from specgrad.figures._figure import Check
from specgrad.plots import COLOURS, MARKERS
from specgrad.stats import PowerLaw, fit_power_law

SHARED_CODE = ("specgrad.linalg", "specgrad.memory", "specgrad.figures._memory")
LABELS = {
    "gd": "gradient descent",
    "muon": "Muon",
    "newton": "Newton",
    "h_lambda": "regularised Muon",
    "whitened_muon": "whitened Muon",
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}

# Exponents are fitted from this dim on: below, the signal needed to beat all competitors, sqrt(2 log N / d), is close to the
# largest that there can be, and local slopes are too steep by 0.2.
FIT_FROM = 128


def check_common(num_items: int, dim: int, alpha: float | int, dtype: str) -> None:
    """Refuses settings that every figure has, by the task's own checks.

    Raises:
        ValueError: naming the setting.
    """
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}; got {dtype!r}.")
    memory.Task(num_items, dim, alpha, storage="stream")


def metrics(task: memory.Task, weight: torch.Tensor) -> dict[str, float | int]:
    """The capacity metrics of a weight, with ``top80`` beside ``top90``."""
    return memory.capacity(task, weight, shares=(0.8, 0.9))


def fit_power(table: pl.DataFrame, x: str, y: str, *, one_draw: bool = False) -> PowerLaw:
    """Power law of column y in column x; a count of zero is known to lie below 1.

    Args:
        table: a row per value.
        x: name of the abscissa.
        y: name of the ordinate.
        one_draw: values of one seed belong together, as along the steps of a run; else each is a draw of its own.
    """
    heights = table[y].to_numpy().astype(float)
    seeds = table["seed"].to_numpy() if one_draw else None
    return fit_power_law(table[x].to_numpy(), np.where(heights > 0, heights, 1.0), seeds, below=heights == 0)


def bound_check(
    name: str, got: float | int, *, least: float | int = -math.inf, most: float | int = math.inf, origin: str
) -> Check:
    """Whether a number lies between two bounds, with where the bounds come from."""
    if math.isinf(least):
        expected = f"<= {most:g}"
    elif math.isinf(most):
        expected = f">= {least:g}"
    else:
        expected = f"{least:g} to {most:g}"
    return Check(name, expected, origin, f"{got:.3g}", least <= got <= most)


def means(table: pl.DataFrame, x: str, y: str) -> tuple[list[float], list[float], list[float]]:
    """x, mean of y over seeds and its standard error (0 for one seed), in order of x."""
    rows = (
        table.group_by(x)
        .agg(pl.col(y).mean().alias("mean"), (pl.col(y).std() / pl.len().sqrt()).fill_null(0.0).alias("error"))
        .sort(x)
    )
    return rows[x].cast(pl.Float64).to_list(), rows["mean"].to_list(), rows["error"].to_list()


def plot_means(axes: Axes, table: pl.DataFrame, x: str, y: str, update: str, **style: Any) -> None:
    """Means over seeds with standard errors, in the colour and marker of an update."""
    xs, ys, errors = means(table, x, y)
    look: dict[str, Any] = {
        "color": COLOURS[update],
        "marker": MARKERS[update],
        "markersize": 4,
        "linestyle": "none",
        "capsize": 2,
    }
    axes.errorbar(xs, ys, yerr=errors, **(look | {"elinewidth": 0.8, "label": LABELS[update]} | style))


def plot_theory(axes: Axes, table: pl.DataFrame, x: str, y: str, slope: float | int, update: str, **style: Any) -> None:
    """The theory's exponent as a line through the geometric mean of the points; constants are not predicted."""
    xs, ys, _ = means(table, x, y)
    middle, through = (
        math.exp(float(np.mean(np.log([value if value > 0 else 0.5 for value in values])))) for values in (xs, ys)
    )
    ends = np.array([min(xs), max(xs)], dtype=float)
    axes.loglog(ends, through * (ends / middle) ** slope, **({"color": COLOURS[update], "linewidth": 1.0} | style))


def plain_minor_ticks(*grid: Axes) -> None:
    """Leaves the minor ticks of logarithmic axes without labels."""
    for axes in grid:
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())


def measured_ticks(axes: Axes, values: Sequence[float | int]) -> None:
    """Ticks of the horizontal axis at the values that were measured, and nowhere else."""
    axis = axes.xaxis
    axis.set_ticks(sorted(set(values)), labels=[f"{value:g}" for value in sorted(set(values))])
    axis.set_minor_locator(NullLocator())
