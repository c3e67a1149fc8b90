"""Muon profits from batches up to about d^(alpha + 1/2), gradient descent only up to sqrt(d); below, both store B^(1/alpha).

Recovered prefix after one step against batch size, with the batch at which each update reaches half of its population value.
"""

import math
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import polars as pl
from matplotlib.figure import Figure

from specgrad import memory
from specgrad.figures._figure import Check, Watch
from specgrad.figures._memory import (
    DTYPES,
    SHARED_CODE,
    bound_check,
    check_common,
    fit_power,
    means,
    metrics,
    plot_means,
)
from specgrad.plots import COLOURS
from specgrad.stats import exponent_check

PAPER = "kim2026"
FIGURE = "figures 1b and 3: capacity against batch size"
EXPERIMENT = "memory-batch"
CODE = (*SHARED_CODE, "specgrad.figures.memory_batch")
MINUTES = {"quick": 0.1, "paper": 4}

# `count` has a spurious peak where a batch holds about d distinct items, because unseen items add no noise.
_METRIC = "top90"

# The batch-limited law is fitted below this share of the predicted critical batch, d^(alpha + 1/2) without its constant:
# there capacities have reached at most (1/16)^(1/alpha), about a sixth, of their limit.
_BELOW = 1 / 16


@dataclass(frozen=True)
class Config:
    """One step of each update for a range of batch sizes, on one draw of embeddings.

    Attributes:
        num_items: number of facts N.
        dim: embedding dimension d.
        alpha: exponent of the frequencies.
        smallest: smallest batch.
        largest: largest batch; beside it the population is measured.
        per_decade: batch sizes per factor of ten.
        dtype: dtype of embeddings and logits: ``float32`` or ``float64``.
        seed: seed of embeddings and batches.
    """

    num_items: int = 100_000
    dim: int = 128
    alpha: float = 1.5
    smallest: int = 10
    largest: int = 1_000_000
    per_decade: int = 4
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        check_common(self.num_items, self.dim, self.alpha, self.dtype)
        if not 1 <= self.smallest < self.largest:
            raise ValueError(f"`smallest` must be >= 1 and below `largest`; got {self.smallest} and {self.largest}.")
        if self.per_decade < 1:
            raise ValueError(f"`per_decade` must be >= 1; got {self.per_decade}.")

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes, evenly spaced in the logarithm."""
        steps = round(self.per_decade * math.log10(self.largest / self.smallest))
        return sorted({round(self.smallest * (self.largest / self.smallest) ** (k / steps)) for k in range(steps + 1)})


PRESETS = {
    "quick": [Config(20_000, dim, per_decade=2, seed=s) for dim in (64, 128, 256) for s in range(3)],
    "paper": [Config(100_000, dim, seed=s) for dim in (128, 256, 512) for s in range(4)],
}


def measure(config: Config, watch: Watch) -> list[dict[str, Any]]:
    """Capacity after one step of each update for each batch size; the population has none."""
    task = memory.Task(config.num_items, config.dim, config.alpha, config.seed, dtype=DTYPES[config.dtype])
    records: list[dict[str, Any]] = []
    updates: tuple[memory.Update, ...] = ("gd", "muon", "newton")
    for done, batch_size in enumerate([*config.batch_sizes, None], 1):
        q = task.frequencies if batch_size is None else task.sample(batch_size)
        seen = int(q.count_nonzero())
        for update in updates:
            got = metrics(task, memory.one_step(task, update, q))
            records.append({"update": update, "batch_size": batch_size, "distinct": seen} | got)
        watch.finished(done, float(records[-1]["count"]))
    return records


def half_batch(rows: pl.DataFrame) -> float:
    """Batch size at which the mean over seeds first reaches half of the population's, between points by interpolation."""
    population = rows.filter(pl.col("batch_size").is_null())[_METRIC].to_numpy().mean()
    sizes, values, _ = means(rows.filter(pl.col("batch_size").is_not_null()), "batch_size", _METRIC)
    for k, (size, value) in enumerate(zip(sizes, values, strict=True)):
        if value >= population / 2:
            if k == 0:
                return float(size)
            share = (math.log(population / 2) - math.log(max(values[k - 1], 0.5))) / math.log(
                value / max(values[k - 1], 0.5)
            )
            return float(sizes[k - 1] * (size / sizes[k - 1]) ** share)
    return math.inf


def check(table: pl.DataFrame) -> list[Check]:
    """The law below the critical batch, the ratio of half-way batches and how Muon's grows with the dimension."""
    checks, halves = [], []
    (alpha,) = table["alpha"].unique().to_list()
    dims = sorted(table["dim"].unique())
    for dim in dims:
        rows = table.filter(pl.col("dim") == dim)
        muon, gd = (rows.filter(pl.col("update") == update) for update in ("muon", "gd"))
        halves.append(half_batch(muon))
        ratio = halves[-1] / half_batch(gd)
        name = f"half-way batch of Muon over gradient descent, d = {dim}"
        # Both half-way batches carry the prefactors that theory leaves open; a decade is far below the d^alpha predicted.
        checks.append(bound_check(name, ratio, least=10, origin="predicted to grow as d^alpha"))
        limited = muon.filter(pl.col("batch_size") >= 30, pl.col("batch_size") <= _BELOW * dim ** (alpha + 0.5))
        if dim >= 128 and limited["batch_size"].n_unique() > 2:
            name = f"exponent of Muon's {_METRIC} in B <= d^(alpha + 1/2) / 16, d = {dim}"
            checks.append(exponent_check(name, fit_power(limited, "batch_size", _METRIC), 1 / alpha, 0.1))
    if len(dims) > 1:
        slope = math.log(halves[-1] / halves[-2]) / math.log(dims[-1] / dims[-2])
        name = f"exponent of Muon's half-way batch, d = {dims[-2]} to {dims[-1]}"
        expected = memory.theory.critical_batch_exponent("muon", alpha)
        # alpha times the excess of the measured capacity exponent, and the grid of batch sizes.
        got = f"{slope:.2f}"
        checks.append(
            Check(name, f"{expected:.2f}", "0.5 (finite size, grid of batches)", got, abs(slope - expected) <= 0.5)
        )
    return checks


def draw(table: pl.DataFrame) -> Figure:
    """One panel per dimension; dashes are population values, the line has the exponent 1/alpha."""
    dims = sorted(table["dim"].unique())
    figure, grid = plt.subplots(1, len(dims), figsize=(0.8 + 2.1 * len(dims), 3.1), sharey=True, squeeze=False)
    (alpha,) = table["alpha"].unique().to_list()
    for axes, dim in zip(grid[0], dims, strict=True):
        rows = table.filter(pl.col("dim") == dim)
        for update in ("newton", "muon", "gd"):
            mine = rows.filter(pl.col("update") == update)
            finite = mine.filter(pl.col("batch_size").is_not_null())
            plot_means(axes, finite, "batch_size", _METRIC, update)
            population = mine.filter(pl.col("batch_size").is_null())[_METRIC].to_numpy().mean()
            axes.axhline(population, color=COLOURS[update], linestyle="--", linewidth=0.9)
        sizes = finite["batch_size"].to_numpy()
        limited = (sizes.min(), dim ** (alpha + 0.5) / 4)
        axes.plot(limited, [0.5 * size ** (1 / alpha) for size in limited], color="#888888", label="½ $B^{1/α}$")
        axes.axvline(dim ** (alpha + 0.5), color=COLOURS["muon"], linestyle=":", linewidth=1)
        axes.axvline(dim**0.5, color=COLOURS["gd"], linestyle=":", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel="batch size B", title=f"d = {dim}")
    grid[0][0].set_ylabel("recovered items (top90)")
    handles, labels = grid[0][0].get_legend_handles_labels()
    note = "dashes: population; dots: predicted critical batches $d^{1/2}$ and $d^{α+1/2}$"
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, title=note, title_fontsize=8)
    return figure
