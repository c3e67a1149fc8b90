"""A mean-field gradient with a few exact rows follows the exact dynamics at a cost linear in N, and knows its own error.

Exact, hybrid and mean-field population Muon from the same embeddings: errors against their estimates, and capacities.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import polars as pl
import torch
from matplotlib.figure import Figure

from specgrad import memory
from specgrad.figures._figure import Check, Watch
from specgrad.figures._memory import DTYPES, SHARED_CODE, bound_check, check_common, fit_power, means
from specgrad.memory.mean_field import Method
from specgrad.stats import exponent_check

PAPER = "kim2026"
FIGURE = "a numerical method for figures 4 and 5 at large N; ours"
EXPERIMENT = "memory-hybrid"
CODE = (*SHARED_CODE, "specgrad.figures.memory_hybrid")
_METHODS: tuple[Method, ...] = ("mean-field", "hybrid")
MINUTES = {"quick": 0.2, "paper": 11}

# Estimates are calibrated while the logits of mean-field rows spread less than this share of sqrt(log N).
_TRUSTED = 0.9


@dataclass(frozen=True)
class Config:
    """Three runs on one draw of embeddings.

    Attributes:
        num_items: number of facts N.
        dim: embedding dimension d.
        alpha: exponent of the frequencies.
        steps: number of steps, of sizes 2, 1, 1, ... times sqrt(d).
        dtype: dtype of embeddings and logits: ``float32`` or ``float64``.
        seed: seed of the embeddings.
    """

    num_items: int = 20_000
    dim: int = 64
    alpha: float = 1.5
    steps: int = 4
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        check_common(self.num_items, self.dim, self.alpha, self.dtype)
        if self.steps < 1:
            raise ValueError(f"`steps` must be >= 1; got {self.steps}.")


# A single step measures the law alone, which needs as many draws at every N.
PRESETS = {
    "quick": [
        Config(items, steps=4 if s < runs else 1, seed=s)
        for items, runs in ((5000, 2), (10_000, 2), (20_000, 1))
        for s in range(4)
    ],
    "paper": [
        Config(items, 128, alpha, seed=s)
        for alpha in (1.25, 1.5, 2.0)
        for items in (12_500, 25_000, 50_000)
        for s in range(3)
    ],
}


def measure(config: Config, watch: Watch) -> list[dict[str, Any]]:
    """Errors at the exact iterates, and metrics of each method along its own trajectory."""
    task = memory.Task(config.num_items, config.dim, config.alpha, config.seed, dtype=DTYPES[config.dtype])
    records: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", memory.MeanFieldWarning)
        exact = memory.simulate(task, "muon", config.steps, "2-1-1-1", on_step=watch.finished)
        # Half of the first step has the size sqrt(d), at which the law N^-1/2 is clean.
        half = exact.weights[0] / 2
        records.append(
            {"study": "law", "method": "mean-field"} | _errors(task, half, "mean-field", memory.gradient(task, half))
        )
        for step, weight in enumerate(exact.weights[:-1], 2):
            reference = memory.gradient(task, weight)
            for method in _METHODS:
                about = {"study": "error", "method": method, "step": step}
                records.append(about | _errors(task, weight, method, reference))
        for name, run in [
            ("exact", exact),
            *((m, memory.simulate(task, "muon", config.steps, "2-1-1-1", m)) for m in _METHODS),
        ]:
            for record in run.records:
                about = {"study": "run", "method": name, "step": record["step"]}
                records.append(about | {k: record[k] for k in ("count", "prefix", "top90")})
    return records


def _errors(task: memory.Task, weight: torch.Tensor, method: Method, exact: torch.Tensor) -> dict[str, float]:
    """Relative error of an approximate gradient, as estimated and as it is."""
    got = memory.estimate_gradient(task, weight, method=method)
    error = float((got.gradient - exact).norm() / exact.norm())
    return {"error": error, "estimate": got.relative_error, "sigma_ratio": got.sigma_ratio}


def _deviations(table: pl.DataFrame) -> pl.DataFrame:
    """Counts of approximate runs next to those of the exact run."""
    keys = ["num_items", "alpha", "seed", "step"]
    runs = table.filter(pl.col("study") == "run").select(*keys, "method", "count")
    exact = runs.filter(pl.col("method") == "exact").select(*keys, pl.col("count").alias("exact"))
    joined = runs.filter(pl.col("method") != "exact").join(exact, on=keys)
    return joined.with_columns(off=(pl.col("count") - pl.col("exact")).abs())


def check(table: pl.DataFrame) -> list[Check]:
    """Estimates against errors, the law N^-1/2, and how far counts of the hybrid are from the exact ones."""
    errors = table.filter(pl.col("study") == "error", pl.col("sigma_ratio") < _TRUSTED)
    ratios = (errors["error"] / errors["estimate"]).to_list()
    deviations = _deviations(table)
    hybrid = deviations.filter(pl.col("method") == "hybrid")
    excess = (hybrid["off"] - (0.02 * hybrid["exact"]).clip(lower_bound=3)).to_numpy().max()
    law = table.filter(pl.col("study") == "law")
    checks = [
        bound_check(
            f"{name} error over estimate where logits spread < {_TRUSTED} sqrt(log N)",
            ratio,
            least=0.5,
            most=2.0,
            origin="none",
        )
        for name, ratio in (("smallest", min(ratios, default=math.nan)), ("largest", max(ratios, default=math.nan)))
    ]
    checks += [
        bound_check("items by which a hybrid count exceeds 2 % or 3 items", float(max(excess, 0)), most=0, origin="none"),
    ]  # fmt: skip
    for (alpha,), rows in law.group_by("alpha", maintain_order=True):
        if rows["num_items"].n_unique() > 1:
            fit = fit_power(rows, "num_items", "error", one_draw=True)
            checks.append(
                exponent_check(
                    f"exponent of the mean-field error in N, first step of sqrt(d), alpha = {alpha:g}", fit, -0.5, 0.1
                )
            )
    return checks


def draw(table: pl.DataFrame) -> Figure:
    """Left: error against estimate. Right: counts of the three runs at the largest N."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.6, 3.2))
    looks = {
        "exact": ("#000000", "o", "exact"),
        "hybrid": ("#0072B2", "^", "hybrid"),
        "mean-field": ("#D55E00", "s", "mean-field"),
    }
    errors = table.filter(pl.col("study") == "error")
    ends = [errors["estimate"].to_numpy().min(), errors["estimate"].to_numpy().max()]
    left.loglog(ends, ends, color="#888888", linewidth=1, label="equal")
    for method in _METHODS:
        colour, marker, label = looks[method]
        rows = errors.filter(pl.col("method") == method)
        for trusted, face in ((True, colour), (False, "none")):
            part = rows.filter((pl.col("sigma_ratio") < _TRUSTED) == trusted)
            left.loglog(
                part["estimate"], part["error"], marker, color=colour, markerfacecolor=face, markersize=4,
                label=label if trusted else None,
            )  # fmt: skip
    left.set(xlabel="estimated relative error", ylabel="relative error of the gradient", title="Error")
    left.legend(fontsize=8, title=f"hollow: logits spread > {_TRUSTED} √log N", title_fontsize=8, loc="upper left")
    items = table["num_items"].to_numpy().max()
    runs = table.filter(pl.col("study") == "run", pl.col("num_items") == items, pl.col("alpha") == table["alpha"].min())
    for place, (name, (colour, marker, label)) in enumerate(looks.items()):
        steps, counts, spread = means(runs.filter(pl.col("method") == name), "step", "count")
        moved = [step + 0.08 * (place - 1) for step in steps]
        look = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 0.8, "capsize": 2, "label": label}
        right.errorbar(moved, counts, yerr=spread, **look)
    right.set(xlabel="step", ylabel="recovered items", title=f"Capacity, N = {items:,}")
    right.set_xticks(steps)
    right.legend(fontsize=8, loc="lower right")
    return figure
