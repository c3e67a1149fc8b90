"""The optimizers that are compared, and their learning rates as a recorded sweep found them."""

import csv
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any, Literal, get_args

import torch

from specgrad.gpt.model import Decoder
from specgrad.optim import Muon, param_groups

Update = Literal["adamw", "muon-out", "muon"]

LABELS: dict[str, str] = {
    "adamw": "AdamW everywhere",
    "muon-out": "Muon on MLP outputs",
    "muon": "Muon on all hidden matrices",
}

# Hidden matrices that stay with AdamW: all, all but the MLP output matrices, none.
_LEFT_TO_ADAMW = {"adamw": re.compile(""), "muon-out": re.compile(r"^(?!.*mlp\.down\.)"), "muon": re.compile(r"(?!)")}


@dataclass(frozen=True)
class Recipe:
    """One optimizer setting of the comparison.

    Attributes:
        update: ``adamw`` (everywhere), ``muon-out`` (Muon on the MLP output matrices, AdamW elsewhere) or ``muon`` (Muon
            on every hidden matrix, AdamW on embedding and head).
        adamw_lr: learning rate of AdamW, > 0.
        muon_lr: learning rate of Muon, > 0; None with ``adamw``, which has no use for it.
        weight_decay: decoupled weight decay of matrices that are hidden, >= 0; embedding and head have none.
        steps: length of the schedule in steps, >= 1: linear warm-up over 5 %, flat to 60 %, linear decay to zero.

    Raises:
        ValueError: for a setting out of range.
    """

    update: Update
    adamw_lr: float
    muon_lr: float | None = None
    weight_decay: float = 0.0
    steps: int = 400

    def __post_init__(self) -> None:
        if self.update not in get_args(Update):
            raise ValueError(f"`update` must be one of {', '.join(get_args(Update))}; got {self.update!r}.")
        for name, value in (("adamw_lr", self.adamw_lr), ("muon_lr", self.muon_lr)):
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"`{name}` must be a finite learning rate > 0; got {value}.")
        if (self.muon_lr is None) != (self.update == "adamw"):
            wanted = "None" if self.update == "adamw" else "a learning rate > 0"
            raise ValueError(f"`muon_lr` must be {wanted} for update {self.update!r}; got {self.muon_lr}.")
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"`weight_decay` must be finite and >= 0; got {self.weight_decay}.")
        if self.steps < 1:
            raise ValueError(f"`steps` must be >= 1; got {self.steps}.")

    def config(self) -> dict[str, Any]:
        """JSON-ready settings."""
        return asdict(self)

    def optimizer(self, model: Decoder) -> torch.optim.Optimizer:
        """The optimizer of ``model`` at the full learning rate."""
        hidden = {route.name for route in param_groups(model).routes if route.update == "spectral"}
        left_out = _LEFT_TO_ADAMW[self.update]
        spectral = {name for name in hidden if not left_out.search(name)}
        groups = [
            {
                "params": [(n, p) for n, p in model.named_parameters() if n in names],
                "update": update,
                "weight_decay": decay,
            }
            for names, update, decay in (
                (spectral, "spectral", self.weight_decay),
                (hidden - spectral, "adamw", self.weight_decay),
                ({n for n, _ in model.named_parameters()} - hidden, "adamw", 0.0),
            )
            if names
        ]
        if self.muon_lr is None:
            return torch.optim.AdamW(groups, lr=self.adamw_lr, betas=(0.9, 0.95))
        return Muon(groups, lr=self.muon_lr, adamw_lr=self.adamw_lr)

    def schedule(self, step: int) -> float:
        """Factor on the learning rates at a step."""
        warm = max(1, round(0.05 * self.steps))
        flat = round(0.6 * self.steps)
        return min(1.0, (step + 1) / warm, (self.steps - step) / max(1, self.steps - flat))


def recorded_sweep() -> list[dict[str, Any]]:
    """The sweep that found the default learning rates: one row per run, as `specgrad demo --tune` writes it."""
    with resources.files("specgrad").joinpath("gpt/tuning.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    numbers = ("adamw_lr", "muon_lr", "val_loss")
    return [row | {name: float(row[name]) if row[name] else None for name in numbers} for row in rows]


def tuned_rates(update: Update, mlp: str, sweep: Sequence[dict[str, Any]] | None = None) -> tuple[float, float | None]:
    """AdamW and Muon learning rates (None for AdamW everywhere) with the lowest validation loss in a sweep.

    Args:
        update: as in `Recipe`.
        mlp: ``relu2`` or ``swiglu``.
        sweep: rows with ``update``, ``mlp``, ``adamw_lr``, ``muon_lr`` and ``val_loss``; the recorded sweep by default.

    Raises:
        ValueError: if the sweep has no row for this optimizer and MLP.
    """
    rows = [r for r in (recorded_sweep() if sweep is None else sweep) if r["update"] == update and r["mlp"] == mlp]
    if not rows:
        raise ValueError(f"The sweep has no row for update {update!r} and mlp {mlp!r}.")
    best = min(rows, key=lambda row: row["val_loss"])
    return best["adamw_lr"], best["muon_lr"]
