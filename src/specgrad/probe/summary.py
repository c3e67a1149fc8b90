"""One line per layer: its last measurement, how often the condition held, what was predicted and realised."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from specgrad.probe.condition import FAILS_BELOW, HOLDS_FROM

# Reason of a layer that only levels 2 and 3 know: a tied weight, whose uses level 1 takes apart, or all without level 1.
UNSEEN = "level 1 does not measure it as a whole"
_UNSEEN: dict[str, Any] = {"tokens": 0, "verdict": "undefined"} | dict.fromkeys(
    ("stable_rank", "nuclear_rank", "ratio"), math.nan
)


@dataclass(frozen=True)
class LayerSummary:
    """One layer, or one block of it, over all its measurements.

    Attributes:
        layer: module name, with the block in brackets.
        kind: ``linear``, ``convolution``, ``embedding``, ``attention``, ``experts`` or ``gain``.
        rows: output dimension (vocabulary of an embedding).
        cols: input dimension (width of an embedding; 1 for a gain).
        tokens: input rows of the last measurement.
        stable_rank: of the inputs, last measurement.
        nuclear_rank: of the gradient, last measurement.
        ratio: nuclear over stable rank, last measurement.
        verdict: last verdict.
        held: share of the defined measurements with ratio >= 1, the paper's condition without margin.
        measured: number of measurements with a defined ratio.
        reason: why the last verdict is undefined, else empty.
        stable_rank_error: relative error of the stable rank, which an estimate overstates; 0 for exact values.
        noise_to_signal: mean squared row norm of the inputs over the squared norm of the mean row.
        outlier_share: share of the largest row in the squared norm of the inputs.
        core_ratio: ratio against the core activation, for attention outputs; NaN elsewhere.
        frequency_exponent: of the token frequencies of an embedding; NaN elsewhere.
        advantage: last predicted advantage of a spectral step (level 2); NaN if not measured.
        advantage_error: its standard error in the logarithm.
        advantage_reason: why the last prediction gave no value, else empty.
        gain: last realised advantage (level 3); NaN if not measured.
        gain_reason: why the last line search gave no value, else empty.
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
    stable_rank_error: float = math.nan
    noise_to_signal: float = math.nan
    outlier_share: float = math.nan
    core_ratio: float = math.nan
    frequency_exponent: float = math.nan
    advantage: float = math.nan
    advantage_error: float = math.nan
    advantage_reason: str = ""
    gain: float = math.nan
    gain_reason: str = ""

    def __str__(self) -> str:
        tail = ""
        if math.isfinite(self.advantage):
            error = f" ({self.advantage_error:.0%} standard error)" if self.advantage_error > 0 else ""
            tail += f"; predicted advantage {self.advantage:.2f}{error}"
        if math.isfinite(self.gain):
            tail += f"; realised {self.gain:.2f}"
        for name, reason in (("predicted", self.advantage_reason), ("realised", self.gain_reason)):
            tail += f"; no {name} advantage, {reason}" if reason else ""
        if self.verdict == "undefined":
            return f"{self.layer}: no verdict, {self.reason}{tail}"
        threshold = {
            "holds": f">= {HOLDS_FROM:g}", "fails": f"< {FAILS_BELOW:g}",
            "marginal": f"in [{FAILS_BELOW:g}, {HOLDS_FROM:g})"
        }[self.verdict]  # fmt: skip
        return (
            f"{self.layer}: {self.verdict}, nuclear rank {self.nuclear_rank:.1f} / stable rank {self.stable_rank:.1f} = "
            f"{self.ratio:.2f} {threshold} (condition held in {self.held:.0%} of {self.measured} measurements){tail}"
        )


def summarise_layers(
    records: Sequence[dict[str, Any]],
    advantages: Sequence[dict[str, Any]] = (),
    gains: Sequence[dict[str, Any]] = (),
) -> list[LayerSummary]:
    """One `LayerSummary` per layer, in order of appearance; last those that only levels 2 and 3 know.

    Args:
        records: of `specgrad.probe.Probe.step`.
        advantages: of `specgrad.probe.measure_advantage`.
        gains: of `specgrad.probe.measure_gain`.
    """
    by_layer: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_layer.setdefault(record["layer"], []).append(record)
    predicted = {row["layer"]: row for row in advantages}
    realised = {row["layer"]: row for row in gains}
    known = {field.name for field in fields(LayerSummary)}
    summaries = []
    for name in dict.fromkeys((*by_layer, *predicted, *realised)):
        rows = by_layer.get(name, [])
        ratios = [row["ratio"] for row in rows if math.isfinite(row["ratio"])]
        held = sum(ratio >= 1 for ratio in ratios) / len(ratios) if ratios else math.nan
        row = rows[-1] if rows else _UNSEEN | (predicted.get(name) or realised[name]) | {"reason": UNSEEN}
        last = {key: value for key, value in row.items() if key in known}
        if name in predicted:
            found = predicted[name]
            last |= {"advantage": found["advantage"], "advantage_error": found["log_error"]}
            last["advantage_reason"] = found["reason"]
        if name in realised:
            last |= {"gain": realised[name]["gain"], "gain_reason": realised[name]["reason"]}
        summaries.append(LayerSummary(**last, held=held, measured=len(ratios)))
    return summaries
