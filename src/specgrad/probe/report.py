"""`ProbeReport`: what a probe measured, per layer and over time."""

import csv
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgrad.probe.condition import FAILS_BELOW, HOLDS_FROM

CAVEAT = (
    "The condition nuclear_rank(gradient) >= stable_rank(inputs) (Davis and Drusvyatskiy, arXiv 2512.04299) is a check of "
    "the regime: it compares guarantees of a spectral step and of plain gradient descent. The ratio is no speed-up, and "
    "it does not rank the layers of one network; values are comparable only at equal token counts."
)


@dataclass(frozen=True)
class LayerSummary:
    """One layer over all its measurements.

    Attributes:
        layer: module name.
        kind: ``linear`` or ``embedding``.
        rows: output dimension (vocabulary of an embedding).
        cols: input dimension (width of an embedding).
        tokens: input rows of the last measurement.
        stable_rank: of the inputs, last measurement.
        nuclear_rank: of the gradient, last measurement.
        ratio: nuclear over stable rank, last measurement.
        verdict: last verdict.
        held: share of the defined measurements with ratio >= 1, the paper's condition without margin.
        measured: number of measurements with a defined ratio.
        reason: why the last verdict is undefined, else empty.
    """

    layer: str
    kind: str
    rows: int
    cols: int
    tokens: int
    stable_rank: float
    nuclear_rank: float
    ratio: float
    verdict: str
    held: float
    measured: int
    reason: str

    def __str__(self) -> str:
        if self.verdict == "undefined":
            return f"{self.layer}: undefined, {self.reason}"
        threshold = {
            "holds": f">= {HOLDS_FROM:g}", "fails": f"< {FAILS_BELOW:g}",
            "marginal": f"in [{FAILS_BELOW:g}, {HOLDS_FROM:g})"
        }[self.verdict]  # fmt: skip
        return (
            f"{self.layer}: {self.verdict}, nuclear rank {self.nuclear_rank:.1f} / stable rank {self.stable_rank:.1f} = "
            f"{self.ratio:.2f} {threshold} (condition held in {self.held:.0%} of {self.measured} measurements)"
        )


def summarise_layers(records: Sequence[dict[str, Any]]) -> list[LayerSummary]:
    """One `LayerSummary` per layer, in order of appearance, from the records of a probe."""
    by_layer: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_layer.setdefault(record["layer"], []).append(record)
    summaries = []
    for rows in by_layer.values():
        ratios = [row["ratio"] for row in rows if math.isfinite(row["ratio"])]
        held = sum(ratio >= 1 for ratio in ratios) / len(ratios) if ratios else math.nan
        last = {key: value for key, value in rows[-1].items() if key != "step"}
        summaries.append(LayerSummary(**last, held=held, measured=len(ratios)))
    return summaries


@dataclass(frozen=True)
class ProbeReport:
    """Measurements of a probe; ``print`` it for the layers and the summary.

    Attributes:
        records: one dict per layer and measured step, see `specgrad.probe.Probe.step`.
        skipped: parameter name -> why it was not probed.
    """

    records: list[dict[str, Any]]
    skipped: dict[str, str]

    @property
    def layers(self) -> list[LayerSummary]:
        """One summary per layer."""
        return summarise_layers(self.records)

    def summary(self) -> str:
        """One sentence for the whole model, weighted by nothing but counts."""
        counts = Counter(layer.verdict for layer in self.layers)
        defined = sum(n for verdict, n in counts.items() if verdict != "undefined")
        parts = [f"{counts[verdict]} {verdict}" for verdict in ("marginal", "fails", "undefined") if counts[verdict]]
        tail = f" ({', '.join(parts)})" if parts else ""
        return f"The condition holds on {counts['holds']} of {defined} matrices{tail}."

    def __str__(self) -> str:
        lines = [str(layer) for layer in self.layers]
        lines += [f"{name}: not probed, {reason}" for name, reason in self.skipped.items()]
        return "\n".join([*lines, self.summary(), CAVEAT])

    def save(self, path: str | Path) -> Path:
        """Writes the measurements.

        Args:
            path: file ending in ``.csv`` or ``.jsonl`` (every measurement), or ``.html`` (a page; needs jinja2).

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
            path.write_text("".join(json.dumps(record) + "\n" for record in self.records), encoding="utf-8")
        elif path.suffix == ".csv":
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(self.records[0]))
                writer.writeheader()
                writer.writerows(self.records)
        else:
            raise ValueError(f"`path` of `ProbeReport.save` must end in .csv, .jsonl or .html; got {str(path)!r}.")
        return path
