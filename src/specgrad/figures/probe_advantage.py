"""The sampled-curvature advantage ranks the blocks of a trained language model as exact line searches do.

The condition's ratio, which ignores curvature, does not rank them and overstates the gain.
"""

from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, NullFormatter
from scipy.stats import spearmanr

from specgrad import gpt
from specgrad.figures._figure import Check, Watch
from specgrad.figures._probe import CODE, train
from specgrad.gpt.model import Mlp
from specgrad.gpt.recipes import Update
from specgrad.probe import Probe

PAPER = "davis2025"
FIGURE = "not in the paper: its layerwise condition tested as a predictor of the one-step gain"
EXPERIMENT = "probe-advantage"
MINUTES = {"quick": 0.1}

# Goals of the probe: mean rank correlation with the realised gain, and error factor that 90 % of blocks stay below.
_LEAST_CORRELATION = 0.8
_LARGEST_FACTOR = 1.35

__all__ = ["CODE", "EXPERIMENT", "FIGURE", "MINUTES", "PAPER", "PRESETS", "Config", "check", "draw", "measure"]


@dataclass(frozen=True)
class Config:
    """One run, at the end of which predictions meet line searches.

    Attributes:
        size: size of the decoder.
        mlp: ``relu2`` or ``swiglu``.
        update: optimizer of the training: ``adamw`` or ``muon``.
        steps: length of the training; blocks are measured after ``first`` steps and at the end.
        first: first measurement, after the burn-in.
        draws: label draws; with 16 sequences, 16 are the probe's default.
        seed: seed of weights and batches.
    """

    size: str = "small"
    mlp: Mlp = "relu2"
    update: Update = "muon"
    steps: int = 400
    first: int = 150
    draws: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.steps:
            raise ValueError(f"`first` must lie between 1 and `steps` {self.steps}; got {self.first}.")
        if self.draws < 1:
            raise ValueError(f"`draws` must be >= 1; got {self.draws}.")


PRESETS = {
    "quick": [Config("tiny", mlp, "muon", 300, 150) for mlp in ("relu2", "swiglu")],
    "paper": [Config(mlp=m, update=u, seed=s) for s in range(3) for m in ("relu2", "swiglu") for u in ("adamw", "muon")],
}


def measure(config: Config, watch: Watch) -> list[dict[str, Any]]:
    """Trains; at the two times measures the condition, the predicted and the realised advantage of every block."""
    task = gpt.Task(size=config.size, mlp=config.mlp, seed=config.seed)
    recipe = gpt.Recipe(config.update, *gpt.tuned_rates(config.update, config.mlp), steps=config.steps)
    model = task.model()
    optimizer = recipe.optimizer(model)
    records: list[dict[str, Any]] = []

    def blocks(step: int) -> None:
        batch = task.batch(step)
        inputs, targets = batch[:, :-1], batch[:, 1:]
        with Probe(model, every=1, exact=True) as probe:
            gpt.loss(model, batch).backward()
            ratios = {row["layer"]: row["ratio"] for row in probe.step()}
        model.zero_grad()
        predicted = probe.measure_advantage(inputs, targets, draws=config.draws, seed=config.seed)
        realised = {row["layer"]: row for row in probe.measure_gain(inputs, targets)}
        for row in predicted:
            known = realised[row["layer"]]
            records.append(
                {"step": step, "layer": row["layer"], "ratio": ratios[row["layer"]], "predicted": row["advantage"]}
                | {"log_error": row["log_error"], "realised": known["gain"], "reason": row["reason"] or known["reason"]}
            )  # fmt: skip

    def before(step: int, batch: Any) -> None:
        if step == config.first and step < config.steps:
            blocks(step)

    train(task, model, optimizer, recipe, before, watch.finished)
    blocks(config.steps)
    return records


def _groups(table: pl.DataFrame) -> list[pl.DataFrame]:
    """The blocks of one network at one time."""
    defined = table.filter(pl.col("predicted").is_not_nan(), pl.col("realised").is_not_nan())
    return defined.partition_by("mlp", "update", "seed", "step", maintain_order=True)


def _correlations(table: pl.DataFrame, predictor: str) -> np.ndarray:
    return np.array([spearmanr(g[predictor], g["realised"]).statistic for g in _groups(table)])


def check(table: pl.DataFrame) -> list[Check]:
    """Rank correlation, error factor and bias of the prediction; the condition's correlation beside them."""
    correlations, others = _correlations(table, "predicted"), _correlations(table, "ratio")
    error = float(correlations.std(ddof=1) / np.sqrt(len(correlations)))
    both = pl.concat(_groups(table))
    log = np.log((both["predicted"] / both["realised"]).to_numpy())
    factors, overstated = np.exp(np.abs(log)), float((both["ratio"] / both["realised"]).median() or np.nan)  # type: ignore[arg-type]
    share = float(np.quantile(factors, 0.9))
    got = float(correlations.mean())
    return [
        Check(
            f"mean rank correlation of predicted with realised advantage, {len(correlations)} network-times",
            f">= {_LEAST_CORRELATION}",
            "two standard errors over network-times",
            f"{got:.2f} ± {error:.2f}",
            got + 2 * error >= _LEAST_CORRELATION,
        ),
        Check(
            f"error factor at 90 % of {len(factors)} blocks (median {np.median(factors):.2f})",
            f"<= {_LARGEST_FACTOR}",
            "none",
            f"{share:.2f}",
            share <= _LARGEST_FACTOR,
        ),
        Check(
            "the condition's ratio ranks worse and overstates the gain",
            "rank correlation below the prediction's, median ratio over gain > 1.5",
            "none",
            f"{others.mean():+.2f}, {overstated:.1f}",
            bool(others.mean() < got and overstated > 1.5),
        ),
    ]


def draw(table: pl.DataFrame) -> Figure:
    """Predictors against the realised advantage: the ratio on the left, the sampled curvature on the right."""
    both = pl.concat(_groups(table))
    figure, axes = plt.subplots(1, 2, figsize=(6.6, 3.3), sharey=True)
    panels = (("ratio", "condition: nr(G) / st(A)", "#E69F00"), ("predicted", "predicted advantage (level 2)", "#0072B2"))
    low, high = float(both["realised"].min()) * 0.85, float(both["realised"].max()) * 1.15  # type: ignore[arg-type]
    for ax, (column, label, colour) in zip(axes, panels, strict=True):
        for mlp, marker in (("relu2", "o"), ("swiglu", "^")):
            rows = both.filter(pl.col("mlp") == mlp)
            name = {"relu2": "squared ReLU", "swiglu": "SwiGLU"}[mlp]
            error = rows["predicted"] * rows["log_error"] if column == "predicted" else None
            ax.errorbar(
                rows[column], rows["realised"], xerr=None if error is None else error.to_numpy(), fmt=marker, ms=3.5,
                color=colour, alpha=0.6, mew=0, elinewidth=0.5, label=name,
            )  # fmt: skip
        ax.plot([low, high], [low, high], color="black", lw=1, label="equal")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel(label)
        mean = _correlations(table, column).mean()
        ax.set_title(f"mean rank correlation {mean:+.2f}")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FormatStrFormatter("%g"))
            axis.set_minor_formatter(NullFormatter())
        ax.set_yticks([1, 1.5, 2, 3, 4, 6], minor=False)
        ax.set_xticks([1, 2, 4, 8, 16] if column == "ratio" else [1, 1.5, 2, 3, 4, 6])
        ax.set_ylim(low, high)
        ax.set_xlim(float(both[column].min()) * 0.85, float(both[column].max()) * 1.2)  # type: ignore[arg-type]
    axes[0].set_ylabel("realised advantage (line search)")
    axes[1].legend(loc="upper left", fontsize=8)
    return figure
