"""What the main job found, as data: losses, gains and layer verdicts."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from specgrad import gpt
from specgrad.figures._figure import Check
from specgrad.figures._gpt import final_losses, updates_of
from specgrad.probe import LayerSummary, summarise_layers

_MLP_OUTPUT = "mlp.down"


@dataclass(frozen=True)
class Outcome:
    """One optimizer's run.

    Attributes:
        update: key of the optimizer.
        label: its name in words.
        val_loss: final validation loss, nats per byte.
        val_stderr: standard error over validation windows.
        gain: validation loss below AdamW's, nats per byte.
        gain_stderr: standard error of the gain, paired over windows.
        steps_to_adamw: step at which the running validation loss reached AdamW's last one; NaN if it never did.
        seconds: training time, probing and validation left out.
        wall_seconds: whole time of the run; of its last part if it was resumed.
        adamw_lr: learning rate of AdamW.
        muon_lr: learning rate of Muon; NaN where there is none.
    """

    update: str
    label: str
    val_loss: float
    val_stderr: float
    gain: float
    gain_stderr: float
    steps_to_adamw: float
    seconds: float
    wall_seconds: float
    adamw_lr: float
    muon_lr: float


@dataclass(frozen=True)
class DemoResult:
    """Everything the report shows.

    Attributes:
        path: where the report is written.
        table: records of the three runs.
        checks: the expected order and the condition's share, with what came out.
        outcomes: one per optimizer, in the expected order.
        layers: per optimizer, one summary per layer.
        about: configuration and provenance of each run.
    """

    path: Path
    table: pl.DataFrame
    checks: list[Check]
    outcomes: list[Outcome]
    layers: dict[str, list[LayerSummary]]
    about: list[dict[str, Any]]

    @classmethod
    def of(cls, path: Path, table: pl.DataFrame, checks: list[Check], about: list[dict[str, Any]]) -> "DemoResult":
        """Computes outcomes and layer summaries from the table of all runs."""
        updates = updates_of(table)
        outcomes = [_outcome(table, update, run) for update, run in zip(updates, about, strict=True)]
        columns = [
            "layer",
            "kind",
            "rows",
            "cols",
            "tokens",
            "stable_rank",
            "nuclear_rank",
            "ratio",
            "verdict",
            "reason",
        ]
        layers = {}
        for update in updates:
            rows = table.filter(pl.col("update") == update, pl.col("layer").is_not_null()).sort("step", maintain_order=True)
            layers[update] = summarise_layers(rows.select(columns).to_dicts())
        return cls(path, table, checks, outcomes, layers, about)

    @property
    def share_of_mlp_outputs(self) -> float:
        """Share of the full gain over AdamW that the MLP output matrices bring alone."""
        return gpt.share_of_gain(*(outcome.val_loss for outcome in self.outcomes))

    def advice(self, layer: LayerSummary) -> tuple[str, str]:
        """Update that the evidence favours for a layer, and the gain measured for the group it belongs to."""
        adamw, outputs, full = self.outcomes
        if layer.kind == "embedding" or layer.layer == "head":
            return "AdamW", "not tried: AdamW in every run"
        if _MLP_OUTPUT in layer.layer:
            gain, group = adamw.val_loss - outputs.val_loss, "all MLP outputs"
        else:
            gain, group = outputs.val_loss - full.val_loss, "all other hidden matrices"
        if gain > 0:
            return ("spectral" if layer.verdict != "fails" else "AdamW"), f"{gain:.3f} ({group})"
        return "AdamW", f"{gain:+.3f} ({group})"


def _outcome(table: pl.DataFrame, update: str, about: dict[str, Any]) -> Outcome:
    rows = table.filter(pl.col("update") == update)
    final = rows.filter(pl.col("sequence_losses").is_not_null())
    gain = gpt.paired_difference(final_losses(table, "adamw"), final_losses(table, update))
    config = about["config"]
    return Outcome(
        update=update,
        label=gpt.LABELS[update],
        val_loss=float(final["val_loss"][0]),
        val_stderr=float(final["val_stderr"][0]),
        gain=gain.mean,
        gain_stderr=gain.stderr,
        steps_to_adamw=_first_below(_running(table, update), float(_running(table, "adamw")["val_loss"][-1])),
        seconds=float(rows["seconds"].max()),  # type: ignore[arg-type]
        wall_seconds=float(about["provenance"]["wall_seconds"]),
        adamw_lr=config["adamw_lr"],
        muon_lr=math.nan if config["muon_lr"] is None else config["muon_lr"],
    )


def _running(table: pl.DataFrame, update: str) -> pl.DataFrame:
    """The running validation curve, all points on the same windows."""
    return table.filter(
        pl.col("update") == update, pl.col("val_loss").is_not_null(), pl.col("sequence_losses").is_null()
    ).sort("step")


def _first_below(curve: pl.DataFrame, target: float) -> float:
    """Step at which a curve first reaches ``target``, by linear interpolation; NaN if it does not."""
    steps, losses = curve["step"].to_numpy(), curve["val_loss"].to_numpy()
    reached = np.flatnonzero(losses <= target)
    if not len(reached):
        return math.nan
    i = int(reached[0])
    if i == 0:
        return float(steps[0])
    weight = (losses[i - 1] - target) / (losses[i - 1] - losses[i])
    return float(steps[i - 1] + weight * (steps[i] - steps[i - 1]))


def write_tables(result: DemoResult, folder: Path) -> None:
    """Writes ``summary.csv``, ``layers.csv``, ``losses.csv``, ``measurements.csv`` and ``checks.csv``."""
    folder.mkdir(parents=True, exist_ok=True)
    pl.DataFrame([asdict(outcome) for outcome in result.outcomes]).write_csv(folder / "summary.csv")
    rows = [
        {"update": update} | asdict(layer) | dict(zip(("favoured", "group_gain"), result.advice(layer), strict=True))
        for update, layers in result.layers.items()
        for layer in layers
    ]
    pl.DataFrame(rows).write_csv(folder / "layers.csv")
    losses = result.table.filter(pl.col("layer").is_null())
    losses.select("update", "step", "train_loss", "val_loss", "val_stderr", "seconds").write_csv(folder / "losses.csv")
    measured = result.table.filter(pl.col("layer").is_not_null())
    measured.select(
        "update", "step", "layer", "kind", "rows", "cols", "tokens", "stable_rank", "nuclear_rank", "ratio", "verdict",
        "reason",
    ).write_csv(folder / "measurements.csv")  # fmt: skip
    pl.DataFrame([asdict(check) for check in result.checks]).write_csv(folder / "checks.csv")
