"""Of real words, one step of Muon or Newton stores as many as of a fitted power law, gradient descent more than predicted.

Words of Shakespeare as facts: their corpus frequencies against rank^-alpha with alpha fitted by maximum likelihood. The
exponent is close to 1, below the range of the theory, and the ten most frequent words are flatter than the fit.

With ``facts`` cities or airports, by inhabitants, their countries are answers that many facts share, as well: Muon, which
levels answers of one fact and of a thousand, then falls behind Newton's method and, for cities, behind gradient descent.
"""

import hashlib
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
from specgrad.data import Facts, airports, cities, read_text, shakespeare, word_counts
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
_FACTS = {"cities": cities, "airports": airports}


@dataclass(frozen=True)
class Config:
    """One population step of each update on one draw of embeddings, for measured and for fitted frequencies.

    Attributes:
        text: path of a text file whose words are the facts; None is the shipped Shakespeare.
        facts: ``words`` of the text, or ``cities`` or ``airports`` with their countries, which need the extra ``data``.
        dim: embedding dimension d.
        dtype: dtype of embeddings and logits: ``float32`` or ``float64``.
        seed: seed of the embeddings.
    """

    text: Path | None = None
    dim: int = 128
    dtype: str = "float32"
    seed: int = 0
    facts: str = "words"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}; got {self.dtype!r}.")
        if self.dim < 1:
            raise ValueError(f"`dim` must be >= 1; got {self.dim}.")
        if self.facts not in ("words", *_FACTS):
            raise ValueError(f"`facts` must be one of words, {', '.join(_FACTS)}; got {self.facts!r}.")
        if self.text is not None and self.facts != "words":
            raise ValueError(f"`text` is for `facts` words; got {str(self.text)!r} and {self.facts!r}.")

    @property
    def known(self) -> Facts | None:
        """The facts with their answers; None for words."""
        return None if self.facts == "words" else _FACTS[self.facts]()

    @cached_property
    def counts(self) -> Int64[np.ndarray, " facts"]:
        """Occurrences of each word or inhabitants of each place, decreasing."""
        if self.known is not None:
            return self.known.counts
        return word_counts(shakespeare() if self.text is None else read_text(self.text))[1]


MINUTES = {"quick": 0.1, "paper": 0.5}
PRESETS = {
    "quick": [Config(dim=dim, seed=s) for dim in (64, 128, 256) for s in range(3)],
    "paper": [Config(dim=dim, seed=s) for dim in (64, 128, 256, 512) for s in range(6)],
}


def identity(config: Config) -> dict[str, Any]:
    """What determines the run's result."""
    settings = {"dim": config.dim, "dtype": config.dtype}
    if config.known is not None:
        listed = repr((config.known.answers, config.counts.tolist())).encode()
        return {"text": config.known.name, "sha256": hashlib.sha256(listed).hexdigest()} | settings
    text = shakespeare() if config.text is None else read_text(config.text)
    return {"text": text.name, "sha256": text.sha256} | settings


def fitted_exponent(counts: Int64[np.ndarray, " facts"]) -> float:
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
    laws: list[tuple[str, Any, tuple[str, ...] | None]] = [("measured", counts, None), ("fitted", ranks**-alpha, None)]
    if config.known is not None:
        laws.append(("shared", counts, config.known.answers))
    for done, (law, weights, answers) in enumerate(laws, 1):
        task = memory.Task.from_counts(weights, config.dim, config.seed, answers=answers, dtype=DTYPES[config.dtype])
        about = {"law": law, "alpha": alpha, "num_items": len(counts)}
        for update in _UPDATES:
            records.append(about | {"update": update} | metrics(task, memory.one_step(task, update)))
        shown = np.unique(np.geomspace(1, len(counts), 60).astype(int))
        p = task.frequencies.numpy()
        records += [about | {"rank": int(rank), "frequency": float(p[rank - 1])} for rank in shown]
        watch.finished(done, float(records[-1]["frequency"]))
    return records


def check(table: pl.DataFrame) -> list[Check]:
    """Counts under measured over fitted frequencies, and the order of the updates under the measured ones.

    Where answers are shared: the order of the updates there, and what sharing gains.
    """
    runs = table.filter(pl.col("update").is_not_null())
    at = runs.group_by("law", "update", "dim").agg(pl.col("count").mean()).iter_rows()
    counts = {(law, update, dim): count for law, update, dim, count in at}
    dims = sorted(runs["dim"].unique())
    checks: list[Check] = []
    if "shared" in runs["law"]:
        return _shared_checks(counts, dims)
    fitting = [dim for dim in dims if dim >= 128] or dims[-1:]
    for update in ("muon", "newton"):
        ratios = [counts["measured", update, dim] / max(counts["fitted", update, dim], 0.5) for dim in fitting]
        worst = max(ratios, key=lambda ratio: abs(np.log(max(ratio, 1e-9))))
        name = f"count under measured over fitted frequencies, {LABELS[update]}, d >= {fitting[0]}, farthest from 1"
        checks.append(
            bound_check(name, worst, least=0.75, most=1.33, origin="a quarter: the prefactor depends on alpha by as much")
        )
    largest = dims[-1]
    lead = {dim: counts["measured", "muon", dim] / max(counts["measured", "gd", dim], 0.5) for dim in dims}
    name = f"lead of Muon over gradient descent, measured frequencies, d = {largest}"
    checks.append(bound_check(name, lead[largest], least=3, origin="grows as d"))
    growth = [lead[b] / lead[a] for a, b in itertools.pairwise(dims)]
    if growth:
        checks.append(
            bound_check("least growth of that lead from one d to the next", min(growth), least=1, origin="grows as d")
        )
    # Gradient descent stores what is at most sqrt(d) times rarer than the most frequent word, and the measured head is flat.
    excess = counts["measured", "gd", largest] / max(counts["fitted", "gd", largest], 0.5)
    name = f"gradient descent's count under measured over fitted frequencies, d = {largest}"
    checks.append(bound_check(name, excess, least=1.5, origin="the most frequent words are flatter than the fit"))
    return checks


def _shared_checks(counts: dict[tuple[str, str, int], float], dims: list[int]) -> list[Check]:
    """Newton leads where answers are shared, and sharing helps it; Muon is behind by a factor that is stated."""
    shared = {(update, dim): max(counts["shared", update, dim], 0.5) for update in _UPDATES for dim in dims}
    lead = min(shared["newton", dim] / max(shared["gd", dim], shared["muon", dim]) for dim in dims)
    gain = min(shared["newton", dim] / max(counts["measured", "newton", dim], 0.5) for dim in dims)
    behind = max(shared["muon", dim] / shared["newton", dim] for dim in dims)
    levelled = "ours: the polar factor levels rare and frequent answers"
    return [
        bound_check("shared answers: Newton over the next best, least over d", lead, least=1, origin=levelled),
        bound_check("shared over distinct answers, Newton, least over d", gain, least=1, origin="fewer outputs compete"),
        bound_check("shared answers: Muon over Newton, most over d", behind, most=1, origin=levelled),
    ]


def draw(table: pl.DataFrame) -> Figure:
    """Left: frequencies by rank with the fit. Right: recovered words, or places, by dimension."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(6.8, 3.2))
    alpha = float(table["alpha"].to_numpy()[0])
    ranks = table.filter(
        pl.col("rank").is_not_null(), pl.col("dim") == table["dim"].min(), pl.col("seed") == table["seed"].min()
    )
    measured, fitted = (ranks.filter(pl.col("law") == law) for law in ("measured", "fitted"))
    left.loglog(measured["rank"], measured["frequency"], ".", color="#0072B2", label="measured")
    left.loglog(fitted["rank"], fitted["frequency"], color="#888888", label=f"$i^{{-{alpha:.2f}}}$, fitted")
    left.set(xlabel="rank", ylabel="frequency", title=str(table["text"][0]))
    left.legend(fontsize=8)
    runs = table.filter(pl.col("update").is_not_null())
    for update in _UPDATES:
        rows = runs.filter(pl.col("update") == update)
        plot_means(right, rows.filter(pl.col("law") == "measured"), "dim", "count", update)
        rows = rows.filter(pl.col("law") == "fitted").group_by("dim").agg(pl.col("count").mean()).sort("dim")
        right.loglog(rows["dim"], rows["count"], color=COLOURS[update], linewidth=1)
        rows = runs.filter(pl.col("update") == update, pl.col("law") == "shared").group_by("dim").agg(pl.col("count").mean())
        right.loglog(rows.sort("dim")["dim"], rows.sort("dim")["count"], "--", color=COLOURS[update], linewidth=1)
    right.set(xlabel="dimension d", ylabel="recovered facts", title="Capacity after one step")
    measured_ticks(right, runs["dim"].unique().to_list())
    plain_minor_ticks(right)
    lines = "markers: measured; lines: fitted" + ("; dashes: shared answers" if "shared" in runs["law"] else "")
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, title=lines, title_fontsize=8)
    return figure
