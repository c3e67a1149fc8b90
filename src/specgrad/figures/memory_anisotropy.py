"""Newton's step and whitened Muon do not see anisotropic embeddings at all, while Muon and gradient descent lose capacity.

Embeddings with covariance eigenvalues i^-kappa and trace 1, isotropic unembeddings, one population step.
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
    LABELS,
    SHARED_CODE,
    bound_check,
    check_common,
    measured_ticks,
    metrics,
    plot_means,
)

PAPER = "kim2026"
FIGURE = "figure 6: Muon against Newton for anisotropic embeddings; whitened Muon is ours"
EXPERIMENT = "memory-anisotropy"
CODE = (*SHARED_CODE, "specgrad.figures.memory_anisotropy")
_UPDATES: tuple[memory.Update, ...] = ("newton", "whitened_muon", "muon", "gd")
MINUTES = {"quick": 0.1, "paper": 3}


@dataclass(frozen=True)
class Config:
    """One population step of each update on one draw of embeddings.

    Attributes:
        num_items: number of facts N.
        dim: embedding dimension d.
        alpha: exponent of the frequencies.
        kappa: exponent of the covariance eigenvalues of the embeddings v.
        dtype: dtype of embeddings and logits: ``float32`` or ``float64``.
        seed: seed of the embeddings; the same standard normals for every kappa.
    """

    num_items: int = 100_000
    dim: int = 128
    alpha: float = 1.5
    kappa: float = 1.0
    dtype: str = "float64"
    seed: int = 0

    def __post_init__(self) -> None:
        check_common(self.num_items, self.dim, self.alpha, self.dtype)
        if not 0 <= self.kappa < float("inf"):
            raise ValueError(f"`kappa` must be finite and >= 0; got {self.kappa}.")


PRESETS = {
    "quick": [Config(20_000, dim, kappa=k, seed=s) for k in (0.0, 0.5, 1.0) for dim in (64, 128, 256) for s in range(2)],
    "paper": [
        Config(100_000, dim, kappa=k, seed=s) for k in (0.0, 0.5, 1.0, 1.5) for dim in (64, 128, 256, 512) for s in range(3)
    ],
}


def measure(config: Config, watch: Watch) -> list[dict[str, Any]]:
    """Capacity after one step of each update."""
    task = memory.Task(
        config.num_items, config.dim, config.alpha, config.seed, kappa_v=config.kappa, dtype=DTYPES[config.dtype]
    )
    records = []
    for done, update in enumerate(_UPDATES, 1):
        records.append({"update": update} | metrics(task, memory.one_step(task, update)))
        watch.finished(done, float(records[-1]["count"]))
    return records


def check(table: pl.DataFrame) -> list[Check]:
    """Whether counts of Newton and whitened Muon are the same for every kappa, and what the others lose."""
    checks = []
    for update in ("newton", "whitened_muon"):
        rows = table.filter(pl.col("update") == update)
        spread = rows.group_by("dim", "seed").agg((pl.col("count").max() - pl.col("count").min()).alias("spread"))
        worst = float(spread["spread"].to_numpy().max())
        # Rounding moves an item whose margin is tiny; the invariance itself is exact.
        name = f"largest change of the count with kappa, {LABELS[update]}"
        checks.append(bound_check(name, worst, most=1, origin="exact invariance, one item for rounding"))
    dim, strongest = int(table["dim"].to_numpy().max()), float(table["kappa"].to_numpy().max())
    at = table.filter(pl.col("dim") == dim).group_by("update", "kappa").agg(pl.col("count").mean())
    counts = {(update, kappa): count for update, kappa, count in at.iter_rows()}
    least = float(table["kappa"].to_numpy().min())
    for update in ("muon", "gd"):
        kept = counts[update, strongest] / counts[update, least]
        name = f"count at kappa = {strongest:g} over kappa = {least:g}, {LABELS[update]}, d = {dim}"
        checks.append(bound_check(name, kept, most=0.85, origin="measured before: 0.66 (Muon), 0.37 (gradient descent)"))
    ratio = counts["whitened_muon", least] / counts["muon", least]
    name = f"whitened Muon over Muon at kappa = {least:g}, d = {dim}"
    checks.append(bound_check(name, ratio, least=0.95, most=1.05, origin="whitening isotropic embeddings changes little"))
    return checks


def draw(table: pl.DataFrame) -> Figure:
    """One panel per kappa."""
    kappas = sorted(table["kappa"].unique())
    figure, grid = plt.subplots(1, len(kappas), figsize=(0.8 + 2.1 * len(kappas), 3.0), sharey=True, squeeze=False)
    for axes, kappa in zip(grid[0], kappas, strict=True):
        for update in _UPDATES:
            rows = table.filter(pl.col("kappa") == kappa, pl.col("update") == update)
            hollow = {"markerfacecolor": "none", "markersize": 7} if update == "newton" else {}
            plot_means(axes, rows, "dim", "count", update, linestyle="-", linewidth=0.8, **hollow)
        axes.set(xscale="log", yscale="log", xlabel="dimension d", title=f"κ = {kappa:g}")
        measured_ticks(axes, table["dim"].unique().to_list())
    grid[0][0].set_ylabel("recovered items")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    return figure
