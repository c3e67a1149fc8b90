"""One step of Muon or Newton stores about d^(1+1/(2 alpha)) facts, one step of gradient descent only d^(1/(2 alpha)).

Recovered items after one population step against the embedding dimension, with the predicted exponents. Gradient descent
stores so few that its exponent needs large dimensions and many draws; those are of 20,000 items.
"""

from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import polars as pl
from matplotlib.figure import Figure

from specgrad import memory
from specgrad.figures._figure import Check, Watch
from specgrad.figures._memory import (
    DTYPES,
    FIT_FROM,
    LABELS,
    SHARED_CODE,
    bound_check,
    check_common,
    fit_power,
    measured_ticks,
    metrics,
    plot_means,
    plot_theory,
)
from specgrad.stats import exponent_check

PAPER = "kim2026"
FIGURE = "figures 1a and 2: capacity against dimension after one population step"
EXPERIMENT = "memory-capacity"
CODE = (*SHARED_CODE, "specgrad.figures.memory_capacity")
MINUTES = {"quick": 0.2, "paper": 30}

# Gradient descent stores a handful of items below this dim, and a tail of isolated lucky ones distorts the count.
_GD_FIT_FROM = 512


@dataclass(frozen=True)
class Config:
    """One population step of each update on one draw of embeddings.

    Attributes:
        num_items: number of facts N.
        dim: embedding dimension d.
        alpha: exponent of the frequencies.
        gd_only: leave out the updates that need a decomposition, for large dims.
        dtype: dtype of embeddings and logits: ``float32`` or ``float64``.
        seed: seed of the embeddings.
    """

    num_items: int = 100_000
    dim: int = 128
    alpha: float = 1.5
    gd_only: bool = False
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        check_common(self.num_items, self.dim, self.alpha, self.dtype)


_ALPHAS = (1.25, 1.5, 2.0)
_PAPER_DIMS = (64, 90, 128, 181, 256, 362, 512, 724, 1024)
# By dim: one draw scatters by a quarter, and the exponent is small.
_GD_DRAWS = {512: 24, 1024: 24, 2048: 24, 4096: 12}
PRESETS = {
    "quick": [
        Config(20_000, d, a, seed=s) for a in _ALPHAS for d in (64, 128, 256, 512) for s in range(4 if d < 512 else 2)
    ],
    "paper": [Config(100_000, d, a, seed=s) for a in _ALPHAS for d in _PAPER_DIMS for s in range(4)]
    + [Config(20_000, d, a, gd_only=True, seed=s) for a in _ALPHAS for d, draws in _GD_DRAWS.items() for s in range(draws)],
}


def measure(config: Config, watch: Watch) -> list[dict[str, Any]]:
    """Capacity after one step of each update."""
    task = memory.Task(config.num_items, config.dim, config.alpha, config.seed, dtype=DTYPES[config.dtype])
    records = []
    updates: tuple[memory.Update, ...] = ("gd",) if config.gd_only else ("gd", "muon", "newton")
    for done, update in enumerate(updates, 1):
        weight = memory.one_step(task, update)
        records.append({"update": update} | metrics(task, weight))
        watch.finished(done, float(records[-1]["count"]))
    return records


def check(table: pl.DataFrame) -> list[Check]:
    """Exponents of Muon and Newton from dim 128, of gradient descent's own runs from dim 512, and the ratio of counts."""
    checks = []
    for alpha in sorted(table["alpha"].unique()):
        rows = table.filter(pl.col("alpha") == alpha)
        for update in ("muon", "newton", "gd"):
            from_dim = _GD_FIT_FROM if update == "gd" else FIT_FROM
            points = rows.filter(
                pl.col("update") == update, pl.col("dim") >= from_dim, pl.col("gd_only") == (update == "gd")
            )
            if points["dim"].n_unique() < 2:
                continue
            metric, slack = ("top90", 0.1) if update == "gd" else ("count", 0.06)
            expected = memory.theory.capacity_exponent(update, alpha)
            name = f"exponent of {metric} in d >= {from_dim}, {LABELS[update]}, alpha = {alpha:g}"
            checks.append(exponent_check(name, fit_power(points, "dim", metric), expected, slack))
        at = rows.filter(pl.col("dim") == 256, ~pl.col("gd_only")).group_by("update").agg(pl.col("count").mean())
        counts = dict(at.iter_rows())
        if alpha == 1.5 and {"gd", "muon"} <= set(counts):
            ratio = counts["muon"] / counts["gd"]
            checks.append(
                bound_check("count of Muon over gradient descent, d = 256, alpha = 1.5", ratio, least=20, origin="none")
            )
    return checks


def draw(table: pl.DataFrame) -> Figure:
    """One panel per alpha: markers are means over seeds, lines have the predicted exponents."""
    alphas = sorted(table["alpha"].unique())
    ticks = [dim for dim in sorted(table["dim"].unique()) if (dim & (dim - 1)) == 0]
    figure, grid = plt.subplots(1, len(alphas), figsize=(0.8 + 2.1 * len(alphas), 3.0), sharey=True, squeeze=False)
    for axes, alpha in zip(grid[0], alphas, strict=True):
        for update in ("newton", "muon", "gd"):
            rows = table.filter(pl.col("alpha") == alpha, pl.col("update") == update)
            many = rows.filter("gd_only")["dim"].unique().to_list()
            rows = rows.filter(pl.col("gd_only") | ~pl.col("dim").is_in(many))
            if rows.is_empty():
                continue
            exponent = memory.theory.capacity_exponent(update, alpha)
            fitted = rows.filter(pl.col("dim") >= (256 if update == "gd" else FIT_FROM))
            plot_theory(axes, fitted if fitted["dim"].n_unique() > 1 else rows, "dim", "count", exponent, update)
            plot_means(axes, rows, "dim", "count", update)
        axes.set(xscale="log", yscale="log", xlabel="dimension d", title=f"α = {alpha:g}")
        measured_ticks(axes, ticks if len(ticks) <= 5 else ticks[::2])
    grid[0][0].set_ylabel("recovered items")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        title="lines: predicted exponents",
        title_fontsize=8,
    )
    return figure
