"""Muon's capacity needs a polar factor that resolves the bulk of the spectrum, d^-alpha; five quintic steps do not.

Capacity after one population step against the regularisation lambda, and for the ways in which a polar factor is computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import polars as pl
import torch
from matplotlib.figure import Figure

from specgrad import memory
from specgrad.figures._figure import Check, Watch
from specgrad.figures._memory import DTYPES, SHARED_CODE, bound_check, check_common, means, metrics
from specgrad.linalg import h_lambda, polar_factor

PAPER = "kim2026"
FIGURE = "the resolution of Theorem 4.1 measured, and polar methods in use; ours"
EXPERIMENT = "memory-polar"
CODE = (*SHARED_CODE, "specgrad.figures.memory_polar")
MINUTES = {"quick": 0.1, "paper": 7}

# lambda in units of d^-alpha.
_RELATIVE = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
_REFERENCE = "exact (SVD)"


@dataclass(frozen=True)
class Config:
    """One population step on one draw of embeddings.

    Attributes:
        num_items: number of facts N.
        dim: embedding dimension d.
        alpha: exponent of the frequencies.
        dtype: dtype of embeddings and logits: ``float32`` or ``float64``.
        seed: seed of the embeddings.
    """

    num_items: int = 50_000
    dim: int = 256
    alpha: float = 1.5
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        check_common(self.num_items, self.dim, self.alpha, self.dtype)


PRESETS = {
    "quick": [Config(20_000, alpha=alpha, seed=s) for alpha in (1.25, 2.0) for s in range(2)],
    "paper": [
        Config(100_000, dim, alpha, seed=s) for alpha in (1.25, 1.5, 2.0) for dim in (128, 256, 512) for s in range(3)
    ],
}


def _methods(gradient: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Every way to orthogonalise a gradient."""
    yield _REFERENCE, polar_factor(gradient, "svd")
    yield "QDWH", polar_factor(gradient, "qdwh")
    yield "eigh strict", polar_factor(gradient, "eigh", "strict")
    yield "zolotarev robust", polar_factor(gradient.float(), "zolotarev", "robust")
    yield "zolotarev fast", polar_factor(gradient.float(), "zolotarev", "fast")
    yield "minimax robust", polar_factor(gradient.float(), "newton_schulz", "robust", dtype=torch.float32)
    for steps in (5, 7, 10):
        yield f"quintic × {steps}", memory.quintic_polar(gradient, steps)


def measure(config: Config, watch: Watch) -> list[dict[str, Any]]:
    """Counts and the share of singular directions missed, for each lambda and method."""
    task = memory.Task(config.num_items, config.dim, config.alpha, config.seed, dtype=DTYPES[config.dtype])
    start = memory.gradient(task)
    scale = config.dim**-config.alpha
    maps: list[tuple[str, str, float | None, torch.Tensor]] = [
        ("lambda", "h_lambda", c, h_lambda(start, c * scale)) for c in _RELATIVE
    ]
    maps += [("method", name, None, direction) for name, direction in _methods(start)]
    maps.append(("method", "gradient descent", None, start))
    records: list[dict[str, Any]] = []
    for done, (study, name, relative, direction) in enumerate(maps, 1):
        missed = memory.polar_shortfall(start, direction)
        records.append({"study": study, "method": name, "relative": relative, "missed": missed} | metrics(task, direction))
        watch.finished(done, float(records[-1]["count"]))
    return records


def _ratios(table: pl.DataFrame) -> pl.DataFrame:
    """The table with each count over that of the exact polar factor on the same draw."""
    keys = ["dim", "alpha", "seed"]
    exact = table.filter(pl.col("method") == _REFERENCE).select(*keys, pl.col("count").alias("exact"))
    return table.join(exact, on=keys).with_columns(ratio=pl.col("count") / pl.col("exact"))


def check(table: pl.DataFrame) -> list[Check]:
    """Flat below 0.1 d^-alpha, lossy at d^-alpha, gradient descent far above; five quintics fall short."""
    checks = []
    largest = table.filter(pl.col("dim") == table["dim"].max())
    for (alpha,), rows in _ratios(largest).group_by("alpha", maintain_order=True):
        at = dict(rows.filter(pl.col("study") == "lambda").group_by("relative").agg(pl.col("ratio").mean()).iter_rows())
        by = dict(rows.filter(pl.col("study") == "method").group_by("method").agg(pl.col("ratio").mean()).iter_rows())
        flat = min(ratio for relative, ratio in at.items() if relative <= 0.1)
        head = f"alpha = {alpha:g}:"
        checks += [
            bound_check(f"{head} least count for lambda <= 0.1 d^-alpha over exact", flat, least=0.95, origin="flat, 5 %"),
            bound_check(
                f"{head} count for lambda = d^-alpha over exact",
                at[1.0],
                least=0.6,
                most=0.9,
                origin="measured before: 0.7 to 0.85",
            ),
            bound_check(
                f"{head} count for lambda = 100 d^-alpha over exact", at[100.0], most=0.2, origin="near gradient descent"
            ),
            bound_check(
                f"{head} QDWH and eigh strict over exact", min(by["QDWH"], by["eigh strict"]), least=0.98, origin="2 %"
            ),
            bound_check(
                f"{head} ten quintic steps over exact",
                by["quintic × 10"],
                least=0.95 if int(largest["dim"].to_numpy()[0]) <= 256 else 0.9,
                origin="0.95 up to d = 256, 0.9 beyond: measured before 0.945 at d = 512, alpha = 2",
            ),
        ]
        if alpha == 2:
            got = by["quintic × 5"]
            checks.append(
                bound_check(f"{head} five quintic steps over exact", got, most=0.35, origin="measured before: 0.2")
            )
    return checks


def draw(table: pl.DataFrame) -> Figure:
    """Left: count against lambda. Right: count of each method."""
    rows = _ratios(table.filter(pl.col("dim") == table["dim"].max()))
    alphas = sorted(rows["alpha"].unique())
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.4), width_ratios=(1, 1.25))
    colours = dict(zip(alphas, ("#56B4E9", "#0072B2", "#002B4D")[-len(alphas) :], strict=True))
    for alpha, colour in colours.items():
        swept = rows.filter(pl.col("alpha") == alpha, pl.col("study") == "lambda")
        xs, ys, errors = means(swept, "relative", "ratio")
        left.errorbar(
            xs, ys, yerr=errors, color=colour, marker="o", markersize=4, linewidth=0.8, capsize=2, label=f"α = {alpha:g}"
        )
        descent = rows.filter(pl.col("alpha") == alpha, pl.col("method") == "gradient descent")["ratio"].to_numpy().mean()
        left.axhline(descent, color=colour, linestyle=":", linewidth=1)
    left.axhline(1, color="#888888", linewidth=0.8)
    (dim,) = rows["dim"].unique().to_list()
    left.set(
        xscale="log",
        xlabel="λ / $d^{-α}$",
        ylabel="recovered items / exact Muon",
        title=f"Regularised, d = {dim}",
        ylim=(0, 1.15),
    )
    left.legend(fontsize=8, title="dots: gradient descent", title_fontsize=8)
    names = rows.filter(pl.col("study") == "method")["method"].unique(maintain_order=True).to_list()[::-1]
    height = 0.8 / len(alphas)
    for place, (alpha, colour) in enumerate(colours.items()):
        mine = rows.filter(pl.col("alpha") == alpha, pl.col("study") == "method")
        ratios = dict(mine.group_by("method").agg(pl.col("ratio").mean()).iter_rows())
        offsets = [k + (place - (len(alphas) - 1) / 2) * height for k in range(len(names))]
        right.barh(offsets, [ratios[name] for name in names], height, color=colour)
    right.set_yticks(range(len(names)), names, fontsize=8)
    right.grid(visible=False, axis="y")
    right.axvline(1, color="#888888", linewidth=0.8)
    right.set(xlabel="recovered items / exact Muon", title="Methods")
    return figure
