"""One look for every plot: a colour per optimizer, print-sized text, vector text that stays text."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

# Okabe and Ito's colours, distinguishable by colour-blind readers and in grey.
COLOURS = {
    "adamw": "#6E6E6E",
    "sgd": "#000000",
    "muon-out": "#E69F00",
    "muon": "#0072B2",
    "gd": "#000000",
    "newton": "#D55E00",
    "h_lambda": "#56B4E9",
    "whitened_muon": "#009E73",
    "zolotarev": "#0072B2",
    "svd": "#000000",
    "newton_schulz": "#D55E00",
    "eigh": "#009E73",
    "qdwh": "#CC79A7",
}

MARKERS = {
    "adamw": "s",
    "sgd": "v",
    "muon-out": "^",
    "muon": "o",
    "gd": "v",
    "newton": "D",
    "h_lambda": "P",
    "whitened_muon": "^",
}

_RC: Any = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 160,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    # Identical data give identical svg files.
    "svg.hashsalt": "specgrad",
}


def style() -> AbstractContextManager[None]:
    """Context in which figures are drawn and saved."""
    context: AbstractContextManager[None] = mpl.rc_context(_RC)
    return context


def save_figure(figure: Figure, stem: Path) -> None:
    """Writes ``stem`` with the endings .pdf, .svg and .png."""
    for ending, metadata in (("pdf", {"CreationDate": None}), ("svg", {"Date": None}), ("png", {})):
        figure.savefig(stem.with_name(f"{stem.name}.{ending}"), metadata=metadata)
