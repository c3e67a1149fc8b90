"""`ProbeReport`: what a probe measured, per layer and over time."""

import csv
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from specgrad.optim.blocks import Blocks
from specgrad.optim.groups import ParamGroups
from specgrad.probe.advice import next_steps, some
from specgrad.probe.routing import routed_groups
from specgrad.probe.summary import UNSEEN, LayerSummary, summarise_layers

CAVEAT = (
    "The condition nuclear_rank(gradient) >= stable_rank(inputs) (Davis and Drusvyatskiy, arXiv 2512.04299) is a check of "
    "the regime: it compares guarantees of a spectral step and of plain gradient descent. The ratio is no speed-up, and "
    "it does not rank the layers of one network; values are comparable only at equal token counts."
)


@dataclass(frozen=True)
class Audit:
    """Predicted against realised advantage on the layers and steps where both were measured.

    Attributes:
        rows: ``step``, ``layer``, ``predicted``, ``realised`` and ``error_factor`` (the larger over the smaller).
        rank_correlation: Spearman correlation over layers, averaged over steps; NaN with fewer than three layers.
        median_factor: median error factor.
        factor_90: 90 % quantile of the error factor.
    """

    rows: list[dict[str, Any]]
    rank_correlation: float
    median_factor: float
    factor_90: float

    def __str__(self) -> str:
        lines = [
            f"step {r['step']} {r['layer']}: predicted {r['predicted']:.2f}, realised {r['realised']:.2f}" for r in self.rows
        ]
        return "\n".join([*lines, self.verdict()])

    def verdict(self) -> str:
        """How good the predictions were, in a sentence."""
        if not self.rows:
            return "No layer has both a prediction and a line search of the same step."
        ranks = f"rank correlation {self.rank_correlation:.2f}, " if math.isfinite(self.rank_correlation) else ""
        return (
            f"Predicted against realised on {len(self.rows)} measurements: {ranks}error factor {self.median_factor:.2f} at "
            f"the median and {self.factor_90:.2f} at 90 %."
        )


def audit(advantages: Sequence[dict[str, Any]], gains: Sequence[dict[str, Any]]) -> Audit:
    """Compares predictions (level 2) with line searches (level 3) by step and layer.

    Example:
        >>> predicted = [{"step": 0, "layer": n, "advantage": a, "reason": ""} for n, a in zip("abc", (1.0, 2.0, 3.0))]
        >>> realised = [{"step": 0, "layer": n, "gain": g, "reason": ""} for n, g in zip("abc", (1.0, 1.5, 3.3))]
        >>> audit(predicted, realised).rank_correlation
        1.0
    """
    from scipy.stats import spearmanr

    found = {(r["step"], r["layer"]): r["gain"] for r in gains if not r["reason"]}
    rows = []
    for row in advantages:
        real = found.get((row["step"], row["layer"]), math.nan)
        if not row["reason"] and row["advantage"] > 0 and real > 0:
            factor = max(row["advantage"] / real, real / row["advantage"])
            rows.append(
                {"step": row["step"], "layer": row["layer"], "predicted": row["advantage"], "realised": real}
                | {"error_factor": factor}
            )
    correlations = []
    for step in sorted({row["step"] for row in rows}):
        both = [(row["predicted"], row["realised"]) for row in rows if row["step"] == step]
        if len(both) >= 3:
            correlations.append(float(spearmanr(*zip(*both, strict=True)).statistic))
    factors = sorted(row["error_factor"] for row in rows)
    return Audit(
        rows,
        statistics.mean(correlations) if correlations else math.nan,
        statistics.median(factors) if factors else math.nan,
        factors[math.ceil(0.9 * len(factors)) - 1] if factors else math.nan,
    )


@dataclass(frozen=True)
class ProbeReport:
    """Measurements of a probe; ``print`` it for the layers, the summary and what to do next.

    Attributes:
        records: one dict per layer and measured step (level 1), see `specgrad.probe.Probe.step`.
        skipped: parameter name -> why it was not probed.
        advantages: predicted advantages (level 2), see `specgrad.probe.measure_advantage`.
        gains: realised advantages (level 3), see `specgrad.probe.measure_gain`.
        overflows: measured steps left out because a gradient was not finite.
        model: the probed model.
    """

    records: list[dict[str, Any]]
    skipped: dict[str, str]
    advantages: list[dict[str, Any]] = field(default_factory=list)
    gains: list[dict[str, Any]] = field(default_factory=list)
    overflows: int = 0
    model: nn.Module | None = field(default=None, repr=False, compare=False)

    @property
    def layers(self) -> list[LayerSummary]:
        """One summary per layer."""
        return summarise_layers(self.records, self.advantages, self.gains)

    def summary(self) -> str:
        """The whole model in a sentence or two."""
        layers = [layer for layer in self.layers if layer.kind != "gain"]
        counts = Counter(layer.verdict for layer in layers if layer.reason != UNSEEN)
        defined = sum(n for verdict, n in counts.items() if verdict != "undefined")
        parts = [f"{counts[verdict]} {verdict}" for verdict in ("marginal", "fails") if counts[verdict]]
        parts += [f"no verdict on {counts['undefined']} more"] if counts["undefined"] else []
        tail = f" ({', '.join(parts)})" if parts else ""
        hidden = [layer for layer in layers if layer.kind != "embedding" and layer.verdict != "undefined"]
        sizes = sum(layer.rows * layer.cols for layer in hidden)
        share = sum(layer.rows * layer.cols for layer in hidden if layer.verdict == "holds") / sizes if sizes else math.nan
        text = f"The condition holds on {counts['holds']} of {defined} matrices{tail}"
        text += f", {share:.0%} of the parameters outside embeddings." if sizes else "."
        text = text if counts else "The condition was not measured."
        for name, what in (("advantage", "Predicted advantage of a spectral step"), ("gain", "Realised gain")):
            values = [getattr(layer, name) for layer in layers if math.isfinite(getattr(layer, name))]
            if values:
                text += f" {what}: {statistics.median(values):.2f}x at the median of {len(values)}."
        return text

    def next_steps(self) -> list[str]:
        """What to do next, most important first."""
        return next_steps(self.layers, self.overflows)

    def audit(self) -> Audit:
        """Predicted against realised advantages."""
        return audit(self.advantages, self.gains)

    def param_groups(
        self,
        model: nn.Module | None = None,
        *,
        threshold: float = 1.0,
        overrides: Mapping[str, str] | None = None,
        blocks: Mapping[str, Blocks] | None = None,
    ) -> ParamGroups:
        """Groups for any specgrad optimizer: spectral on the hidden matrices where the measurements do not speak against it.

        Level 2 decides where it was measured; elsewhere the condition is a veto where it fails.

        Args:
            model: the model to route; default: the probed one.
            threshold: least predicted advantage that keeps a matrix spectral, > 0.
            overrides: as in `specgrad.optim.param_groups`; the user's word comes first.
            blocks: as there.

        Raises:
            ValueError: if there is no model, or ``threshold`` is not positive.
        """
        model = model if model is not None else self.model
        if model is None:
            raise ValueError("`model` of `ProbeReport.param_groups` must be given; this report carries none.")
        if not threshold > 0:
            raise ValueError(f"`threshold` of `ProbeReport.param_groups` must be > 0; got {threshold}.")
        return routed_groups(model, self.records, self.advantages, threshold, overrides, blocks)

    def __str__(self) -> str:
        lines = [str(layer) for layer in self.layers]
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            by_reason.setdefault(reason, []).append(name)
        lines += [f"{some(names)}: not probed, {reason}" for reason, names in by_reason.items()]
        lines += [self.summary(), *self.next_steps()]
        if self.gains and self.advantages:
            lines.append(str(self.audit()))
        return "\n".join([*lines, CAVEAT])

    def _repr_html_(self) -> str:
        """The table of layers, for notebooks; plain text without the ``lab`` extra."""
        try:
            from specgrad.probe.page import notebook_html
        except ModuleNotFoundError:
            import html

            return f"<pre>{html.escape(str(self))}</pre>"
        return notebook_html(self)

    def save(self, path: str | Path) -> Path:
        """Writes the measurements.

        Args:
            path: file ending in ``.csv`` (every measurement of level 1), ``.jsonl`` (every measurement, with its ``level``),
                or ``.html`` (a page; needs jinja2).

        Returns:
            The path written.

        Raises:
            ValueError: for another ending.
        """
        path = Path(path)
        if path.suffix == ".html":
            from specgrad.probe.page import probe_page

            path.write_text(probe_page(self), encoding="utf-8")
        elif path.suffix == ".jsonl":
            levels = ((1, self.records), (2, self.advantages), (3, self.gains))
            lines = [json.dumps({"level": level} | _plain(row)) for level, rows in levels for row in rows]
            path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        elif path.suffix == ".csv":
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(self.records[0]) if self.records else [])
                writer.writeheader()
                writer.writerows(self.records)
        else:
            raise ValueError(f"`path` of `ProbeReport.save` must end in .csv, .jsonl or .html; got {str(path)!r}.")
        return path


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """A record as JSON knows it: numbers that are not finite become null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
