"""What the figures on associative memory share: settings, fits of exponents, checks and drawing of means."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from specgrad import memory
from specgrad.figures._figure import Check, Watch
from specgrad.plots import COLOURS, MARKERS

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

# How far exponents at dims of a few hundred may lie from their limit: measured excess of one-step exponents fitted to
# d = 128 to 1024 is at most 0.05 (Muon) and -0.05 (Newton).
FINITE_SIZE = 0.06


def check_common(num_items: int, dim: int, alpha: float, dtype: str) -> None:
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


def pause(watch: Watch, done: int, value: float) -> None:
    """Reports a finished part, and stops the measurement if asked to.

    Raises:
        KeyboardInterrupt: if the watch says so; nothing is stored of an unfinished measurement.
    """
    if watch.on_step is not None:
        watch.on_step(done, value)
    if watch.should_stop is not None and watch.should_stop():
        raise KeyboardInterrupt("stopped between two points of a measurement")


@dataclass(frozen=True)
class Fit:
    """A power law ``y = exp(constant) x^slope`` through the means over seeds.

    Attributes:
        slope: least squares on logarithms.
        constant: logarithm of the prefactor.
        error: standard error of the slope from the spread over seeds, pooled over x; NaN without repeated seeds.
        local: slopes between neighbouring x.
    """

    slope: float
    constant: float
    error: float
    local: tuple[float, ...]


def fit_power(table: pl.DataFrame, x: str, y: str) -> Fit:
    """Fits column y against column x; rows of equal x are draws of one mean.

    The relative spread is pooled over x, because a few seeds per x say little each.

    Raises:
        ValueError: if there are fewer than two values of x.
    """
    rows = table.group_by(x).agg(pl.col(y).mean().alias("mean"), pl.col(y).var().alias("variance"), pl.len()).sort(x)
    if rows.height < 2:
        raise ValueError(f"`x` of a fit must take at least two values; got {rows[x].to_list()}.")
    xs = np.log(rows[x].to_numpy().astype(float))
    # Counts can be zero.
    heights = np.maximum(rows["mean"].to_numpy().astype(float), 0.5)
    number = rows["len"].to_numpy().astype(float)
    variances = rows["variance"].fill_null(0.0).to_numpy().astype(float) / heights**2
    spare = float((number - 1).sum())
    pooled = float(((number - 1) * variances).sum() / spare) if spare else math.nan
    weights = (xs - xs.mean()) / ((xs - xs.mean()) ** 2).sum()
    slope = float(weights @ np.log(heights))
    error = math.sqrt(float((weights**2 * pooled / number).sum()))
    local = np.diff(np.log(heights)) / np.diff(xs)
    return Fit(slope, float(np.log(heights).mean() - slope * xs.mean()), error, tuple(local.tolist()))


def exponent_check(name: str, fit: Fit, expected: float, slack: float = FINITE_SIZE) -> Check:
    """Whether a fitted exponent is the theory's, within a finite-size slack and two standard errors over seeds."""
    error = 0.0 if math.isnan(fit.error) else fit.error
    local = ", ".join(f"{slope:.2f}" for slope in fit.local)
    return Check(
        name=name,
        expected=f"{expected:.3f}",
        tolerance=f"{slack:g} (finite size) + 2 standard errors",
        got=f"{fit.slope:.3f} ± {error:.3f} (local slopes {local})",
        passed=abs(fit.slope - expected) <= slack + 2 * error,
    )


def bound_check(name: str, got: float, *, least: float = -math.inf, most: float = math.inf, origin: str) -> Check:
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
    return rows[x].to_list(), rows["mean"].to_list(), rows["error"].to_list()


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


def plot_theory(axes: Axes, table: pl.DataFrame, x: str, y: str, slope: float, update: str, **style: Any) -> None:
    """The theory's exponent as a line through the geometric mean of the points; constants are not predicted."""
    xs, ys, _ = means(table, x, y)
    middle, through = (math.exp(float(np.mean(np.log(np.maximum(values, 0.5))))) for values in (xs, ys))
    ends = np.array([min(xs), max(xs)], dtype=float)
    axes.loglog(ends, through * (ends / middle) ** slope, **({"color": COLOURS[update], "linewidth": 1.0} | style))


def measured_ticks(axes: Axes, values: Sequence[float]) -> None:
    """Ticks of the horizontal axis at the values that were measured, and nowhere else."""
    axis = axes.xaxis
    axis.set_ticks(sorted(set(values)), labels=[f"{value:g}" for value in sorted(set(values))])
    axis.set_minor_locator(NullLocator())
