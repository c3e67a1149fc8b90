"""Of real words, one step of Muon or Newton stores as many as of a fitted power law, gradient descent more than predicted.

Words of Shakespeare as facts: their corpus frequencies against rank^-alpha with alpha fitted by maximum likelihood. The
exponent is close to 1, below the range of the theory, and the ten most frequent words are flatter than the fit.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from jaxtyping import Int64
from matplotlib.figure import Figure
from scipy.optimize import minimize_scalar

from specgrad import memory
from specgrad.data import read_text, shakespeare, word_counts
from specgrad.figures._figure import Check, Watch
from specgrad.figures._memory import (
    DTYPES,
    LABELS,
    SHARED_CODE,
    bound_check,
    measured_ticks,
    metrics,
    plain_minor_ticks,
    plot_means,
)
from specgrad.plots import COLOURS

PAPER = "kim2026"
FIGURE = "the power-law assumption of section 3 on real frequencies; ours"
EXPERIMENT = "memory-words"
CODE = (*SHARED_CODE, "specgrad.data", "specgrad.figures.memory_words")
_UPDATES: tuple[memory.Update, ...] = ("newton", "muon", "gd")


@dataclass(frozen=True)
class Config:
    """One population step of each update on one draw of embeddings, for measured and for fitted frequencies.

    Attributes:
        text: path of a text file whose words are the facts; None is the shipped Shakespeare.
        dim: embedding dimension d.
        dtype: dtype of embeddings and logits: ``float32`` or ``float64``.
        seed: seed of the embeddings.
    """

    text: Path | None = None
    dim: int = 128
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}; got {self.dtype!r}.")
        if self.dim < 1:
            raise ValueError(f"`dim` must be >= 1; got {self.dim}.")

    @cached_property
    def counts(self) -> Int64[np.ndarray, " words"]:
        """Occurrences of each word, decreasing."""
        return word_counts(shakespeare() if self.text is None else read_text(self.text))[1]


PRESETS = {
    "quick": [Config(dim=dim, seed=s) for dim in (64, 128, 256) for s in range(3)],
    "paper": [Config(dim=dim, seed=s) for dim in (64, 128, 256, 512) for s in range(6)],
}


def identity(config: Config) -> dict[str, Any]:
    """What determines the run's result."""
    text = shakespeare() if config.text is None else read_text(config.text)
    return {"text": text.name, "sha256": text.sha256, "dim": config.dim, "dtype": config.dtype}


def fitted_exponent(counts: Int64[np.ndarray, " words"]) -> float:
    """Maximum likelihood of ``p_i ~ i^-alpha`` on the ranks 1 to N, the counts in decreasing order."""
    logs = np.log(np.arange(1, len(counts) + 1))
    mean = float(counts @ logs / counts.sum())
    found = minimize_scalar(lambda a: a * mean + np.log(np.exp(-a * logs).sum()), bounds=(0.1, 5), method="bounded")
    return float(found.x)


def measure(config: Config, watch: Watch) -> list[dict[str, Any]]:
    """Capacity after one step of each update, and the frequencies at a few ranks."""
    counts = config.counts
    alpha = fitted_exponent(counts)
    ranks = np.arange(1, len(counts) + 1, dtype=np.float64)
    records: list[dict[str, Any]] = []
    for done, (law, weights) in enumerate((("measured", counts), ("fitted", ranks**-alpha)), 1):
        task = memory.Task.from_counts(weights, config.dim, config.seed, dtype=DTYPES[config.dtype])
        about = {"law": law, "alpha": alpha, "num_items": len(counts)}
        for update in _UPDATES:
            records.append(about | {"update": update} | metrics(task, memory.one_step(task, update)))
        shown = np.unique(np.geomspace(1, len(counts), 60).astype(int))
        p = task.frequencies.numpy()
        records += [about | {"rank": int(rank), "frequency": float(p[rank - 1])} for rank in shown]
        watch.finished(done, float(records[-1]["frequency"]))
    return records


def check(table: pl.DataFrame) -> list[Check]:
    """Counts under measured over fitted frequencies, and the order of the updates under the measured ones."""
    runs = table.filter(pl.col("update").is_not_null())
    at = runs.group_by("law", "update", "dim").agg(pl.col("count").mean()).iter_rows()
    counts = {(law, update, dim): count for law, update, dim, count in at}
    dims = sorted(runs["dim"].unique())
    checks = []
    for update in ("muon", "newton"):
        ratios = [counts["measured", update, dim] / max(counts["fitted", update, dim], 0.5) for dim in dims if dim >= 128]
        worst = max(ratios, key=lambda ratio: abs(np.log(ratio)))
        name = f"count under measured over fitted frequencies, {LABELS[update]}, d >= 128, farthest from 1"
        checks.append(
            bound_check(name, worst, least=0.75, most=1.33, origin="a quarter: the prefactor depends on alpha by as much")
        )
    largest = dims[-1]
    lead = {dim: counts["measured", "muon", dim] / max(counts["measured", "gd", dim], 0.5) for dim in dims}
    name = f"lead of Muon over gradient descent, measured frequencies, d = {largest}"
    checks.append(bound_check(name, lead[largest], least=3, origin="grows as d"))
    growth = min(lead[b] / lead[a] for a, b in itertools.pairwise(dims))
    checks.append(bound_check("least growth of that lead from one d to the next", growth, least=1, origin="grows as d"))
    # Gradient descent stores what is at most sqrt(d) times rarer than the most frequent word, and the measured head is flat.
    excess = counts["measured", "gd", largest] / max(counts["fitted", "gd", largest], 0.5)
    name = f"gradient descent's count under measured over fitted frequencies, d = {largest}"
    checks.append(bound_check(name, excess, least=1.5, origin="the most frequent words are flatter than the fit"))
    return checks


def draw(table: pl.DataFrame) -> Figure:
    """Left: frequencies by rank with the fit. Right: recovered words by dimension."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.8, 3.2))
    alpha = float(table["alpha"].to_numpy()[0])
    ranks = table.filter(
        pl.col("rank").is_not_null(), pl.col("dim") == table["dim"].min(), pl.col("seed") == table["seed"].min()
    )
    measured, fitted = (ranks.filter(pl.col("law") == law) for law in ("measured", "fitted"))
    left.loglog(measured["rank"], measured["frequency"], ".", color="#0072B2", label="measured")
    left.loglog(fitted["rank"], fitted["frequency"], color="#888888", label=f"$i^{{-{alpha:.2f}}}$, fitted")
    left.set(xlabel="rank of the word", ylabel="frequency", title="Words of Shakespeare")
    left.legend(fontsize=8)
    runs = table.filter(pl.col("update").is_not_null())
    for update in _UPDATES:
        rows = runs.filter(pl.col("update") == update)
        plot_means(right, rows.filter(pl.col("law") == "measured"), "dim", "count", update)
        rows = rows.filter(pl.col("law") == "fitted").group_by("dim").agg(pl.col("count").mean()).sort("dim")
        right.loglog(rows["dim"], rows["count"], color=COLOURS[update], linewidth=1)
    right.set(xlabel="dimension d", ylabel="recovered words", title="Markers: measured, lines: fitted")
    measured_ticks(right, runs["dim"].unique().to_list())
    plain_minor_ticks(right)
    right.legend(fontsize=8)
    return figure
