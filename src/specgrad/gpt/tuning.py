"""The sweep that finds each optimizer's learning rates: a bracketing search on a factor-of-two grid."""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specgrad.gpt.recipes import Recipe, Update

COLUMNS = ("size", "mlp", "update", "adamw_lr", "muon_lr", "seed", "steps", "text", "val_loss")

# The middles of the first brackets; a bracket moves by factors of two until its middle is best.
_ADAMW_START = 0.004
_MUON_START = 0.02
_MOST_MOVES = 6


def tune(measure: Callable[[Recipe], float], steps: int, mlp: str) -> Iterator[dict[str, Any]]:
    """Searches learning rates for the three optimizers; yields one row per finished run.

    AdamW first. The AdamW rate it finds is also that of the parameters that Muon leaves to AdamW, for which only Muon's
    own rate is searched, so that every optimizer has one rate tuned to a factor of two.

    Args:
        measure: final validation loss of a recipe; infinity for one that diverges.
        steps: length of every run.
        mlp: recorded with each row.
    """
    best: dict[Update, float] = {}
    for update in ("adamw", "muon-out", "muon"):
        losses: dict[float, float] = {}

        def recipe(rate: float, update: Update = update) -> Recipe:
            if update == "adamw":
                return Recipe(update, rate, steps=steps)
            return Recipe(update, best["adamw"], rate, steps=steps)

        middle = _ADAMW_START if update == "adamw" else _MUON_START
        for _ in range(_MOST_MOVES):
            for rate in (middle / 2, middle, middle * 2):
                if rate not in losses:
                    tried = recipe(rate)
                    losses[rate] = measure(tried)
                    rates = {"adamw_lr": tried.adamw_lr, "muon_lr": tried.muon_lr}
                    yield {"mlp": mlp, "update": update, **rates, "steps": steps, "val_loss": losses[rate]}
            winner = min((middle / 2, middle, middle * 2), key=losses.__getitem__)
            if winner == middle:
                break
            middle = winner
        best[update] = min(losses, key=losses.__getitem__)


def write_sweep(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes sweep rows as CSV with the columns `COLUMNS`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
