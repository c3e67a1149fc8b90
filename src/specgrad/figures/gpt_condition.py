"""While a small language model trains, nr(gradient) >= st(inputs) on nearly every matrix at nearly every time.

Activations keep a low stable rank and gradients spread out, whichever optimizer is used.
"""

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from matplotlib.figure import Figure

from specgrad import gpt
from specgrad.figures._figure import Check
from specgrad.figures._gpt import CODE, EXPERIMENT, Config, identity, measure, presets, updates_of
from specgrad.plots import ratio_heat_map

PAPER = "davis2025"
FIGURE = "nuclear ranks of gradients and stable ranks of activations during NanoGPT training"
CITES = ("jordan2024", "wang2025", "loshchilov2019")
PRESETS = presets()
MINUTES = {"quick": 0.3}

# The share measured at this scale on other text was 0.986 to 0.995.
_LEAST_SHARE = 0.9

__all__ = [
    "CITES", "CODE", "EXPERIMENT", "FIGURE", "MINUTES", "PAPER", "PRESETS", "Config", "check", "draw", "identity", "measure",
]  # fmt: skip


def check(table: pl.DataFrame) -> list[Check]:
    """Share of (layer, time) pairs on which the condition holds, for each optimizer."""
    checks = []
    for update in updates_of(table):
        ratios = table.filter(pl.col("update") == update, pl.col("ratio").is_not_nan())["ratio"]
        share = float((ratios.to_numpy() >= 1).mean())
        checks.append(
            Check(
                name=f"share of layers and times with nr >= st, {gpt.LABELS[update]}",
                expected=f">= {_LEAST_SHARE:.0%}",
                tolerance="none",
                got=f"{share:.1%} of {len(ratios)}",
                passed=share >= _LEAST_SHARE,
            )
        )
    return checks


def draw(table: pl.DataFrame) -> Figure:
    """One heat map of nr/st per optimizer: layers down, steps across."""
    updates = updates_of(table)
    layers = table.filter(pl.col("layer").is_not_null())["layer"].unique(maintain_order=True).to_list()
    figure, grid = plt.subplots(
        len(updates), 1, figsize=(4.2, 0.5 + len(updates) * (0.45 + 0.16 * len(layers))), squeeze=False
    )
    for axes, update in zip(grid[:, 0], updates, strict=True):
        rows = table.filter(pl.col("update") == update, pl.col("layer").is_not_null())
        means = rows.group_by("layer", "step").agg(pl.col("ratio").mean())
        steps = sorted(means["step"].unique().to_list())
        cells = {(layer, step): ratio for layer, step, ratio in means.iter_rows()}
        ratios = np.array([[cells.get((layer, step), np.nan) for step in steps] for layer in layers], dtype=float)
        image = ratio_heat_map(axes, ratios, layers, steps)
        axes.tick_params(axis="y", labelsize=8)
        axes.set_title(gpt.LABELS[update])
    grid[-1, 0].set_xlabel("step")
    bar = figure.colorbar(image, ax=grid[:, 0].tolist(), location="bottom", aspect=40, pad=0.02, shrink=0.8)
    bar.set_ticks([1 / 8, 1 / 2, 1, 2, 8], labels=["⅛", "½", "1", "2", "8"])
    bar.ax.tick_params(labelsize=8)
    bar.set_label(fontsize=8, label="nuclear rank of gradient / stable rank of inputs\nfails below ½, holds from 2")
    bar.minorticks_off()
    return figure
