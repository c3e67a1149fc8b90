"""Thresholded gradients, which the multi-step theory analyses, store more with every step if items leave late enough.

The dynamics of Theorem 5.4 without any softmax, for three ways to drop items, beside exact Muon.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import polars as pl
from matplotlib.figure import Figure

from specgrad import memory
from specgrad.figures._figure import Check, Watch
from specgrad.figures._memory import DTYPES, SHARED_CODE, bound_check, check_common, fit_power, means
from specgrad.stats import exponent_check

PAPER = "kim2026"
FIGURE = "the thresholded dynamics of equation 10 simulated; ours"
EXPERIMENT = "memory-thresholded"
CODE = (*SHARED_CODE, "specgrad.figures.memory_thresholded")
MINUTES = {"quick": 0.1, "paper": 4}

# Measured before on one seed, d = 128 to 256: 1.46, 1.72, 1.89 where 1.56, 1.70, 1.80 are predicted.
_SLACK = 0.12


@dataclass(frozen=True)
class Config:
    """Thresholded and exact runs on one draw of embeddings.

    Attributes:
        num_items: number of facts N.
        dim: embedding dimension d.
        alpha: exponent of the frequencies.
        steps: number of steps.
        constant: constant of the schedule that lets items leave late.
        early: a larger constant, with which the head of the list is forgotten.
        dtype: dtype of embeddings and logits: ``float32`` or ``float64``.
        seed: seed of the embeddings.
    """

    num_items: int = 20_000
    dim: int = 256
    alpha: float = 1.5
    steps: int = 4
    constant: float = 0.05
    early: float = 0.19
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        check_common(self.num_items, self.dim, self.alpha, self.dtype)
        if self.steps < 1:
            raise ValueError(f"`steps` must be >= 1; got {self.steps}.")
        if not 0 < self.constant < self.early:
            raise ValueError(f"`constant` must be > 0 and below `early`; got {self.constant} and {self.early}.")


PRESETS = {
    "quick": [Config(dim=dim, seed=s) for dim in (128, 256) for s in range(2)],
    # More items disturb each other more: with the constant of `quick` the head is forgotten at the fourth step.
    "paper": [Config(100_000, dim, constant=0.04, seed=s) for dim in (128, 256, 512) for s in range(3)],
}


def measure(config: Config, watch: Watch) -> list[dict[str, Any]]:
    """Metrics after each step of each dynamics."""
    task = memory.Task(config.num_items, config.dim, config.alpha, config.seed, dtype=DTYPES[config.dtype])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", memory.MeanFieldWarning)
        runs = {
            "late": memory.simulate_thresholded(task, config.steps, constant=config.constant),
            "early": memory.simulate_thresholded(task, config.steps, constant=config.early),
            "recovered": memory.simulate_thresholded(task, config.steps, drop="recovered"),
            "exact": memory.simulate(task, "muon", config.steps, "2-1-1-1", "hybrid"),
        }
    keep = ("step", "relative_rate", "dropped", "count", "prefix", "top90", "accuracy")
    records = [{"rule": rule} | {k: record.get(k) for k in keep} for rule, run in runs.items() for record in run.records]
    watch.finished(len(records), float(runs["exact"].records[-1]["count"]))
    return records


def check(table: pl.DataFrame) -> list[Check]:
    """Growth under the late schedule, its exponents, and forgetting under the early one."""
    dim = int(table["dim"].to_numpy().max())
    at = table.filter(pl.col("dim") == dim).group_by("rule", "step").agg(pl.col("top90").mean()).iter_rows()
    top = {(rule, step): value for rule, step, value in at}
    last = max(step for _, step in top)
    growth = min(top["late", step + 1] / top["late", step] for step in range(1, last))
    checks = [
        bound_check(f"least growth of top90 by a step, late schedule, d = {dim}", growth, least=1, origin="none"),
        bound_check(
            f"top90 of the early over the late schedule, last step, d = {dim}", top["early", last] / top["late", last],
            most=0.5, origin="the head of the list is forgotten; measured before: 0.1",
        ),
    ]  # fmt: skip
    late = table.filter(pl.col("rule") == "late")
    (alpha,) = table["alpha"].unique().to_list()
    if late["dim"].n_unique() > 1:
        for step in range(2, min(last, 4) + 1):
            fit = fit_power(late.filter(pl.col("step") == step), "dim", "count")
            expected = memory.theory.capacity_exponent("muon", alpha, step)
            checks.append(exponent_check(f"exponent of count after {step} steps, late schedule", fit, expected, _SLACK))
    return checks


def draw(table: pl.DataFrame) -> Figure:
    """One panel per dimension."""
    dims = sorted(table["dim"].unique())
    figure, grid = plt.subplots(1, len(dims), figsize=(1.0 + 2.9 * len(dims), 3.4), sharey=True, squeeze=False)
    looks = {
        "exact": ("#0072B2", "o", "exact gradient"),
        "late": ("#009E73", "^", "thresholded, items leave late"),
        "early": ("#D55E00", "s", "thresholded, items leave early"),
        "recovered": ("#CC79A7", "D", "thresholded, recovered items leave"),
    }
    for axes, dim in zip(grid[0], dims, strict=True):
        rows = table.filter(pl.col("dim") == dim)
        for rule, (colour, marker, label) in looks.items():
            steps, tops, errors = means(rows.filter(pl.col("rule") == rule), "step", "top90")
            look = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 0.8, "capsize": 2, "linestyle": "--"}
            axes.errorbar(steps, tops, yerr=errors, **(look | {"label": label}))
        axes.set(yscale="log", xlabel="step", title=f"d = {dim}")
        axes.set_xticks(steps)
    grid[0][0].set_ylabel("recovered items (top90)")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
    return figure
