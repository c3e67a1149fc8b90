"""The rational polar factor maps every singular value above its interval to within its equioscillation error of 1.

Distance of each mode to the float64 polar factor, for matrices of growing condition number.
"""

from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import polars as pl
import torch
from matplotlib.figure import Figure

from specgrad.figures._figure import Check, Watch
from specgrad.linalg import polar_factor
from specgrad.linalg.polar import ZOLOTAREV
from specgrad.linalg.zolotarev import rational_sign
from specgrad.runs import stream

PAPER = "davis2025"
FIGURE = "kernel of the spectral step"
EXPERIMENT = "polar-error"
CODE = ("specgrad.linalg", "specgrad.figures.polar_error")


@dataclass(frozen=True)
class Config:
    """Matrices of one width.

    Attributes:
        rows: number of rows.
        cols: number of columns.
        draws: matrices per condition number.
        seed: seed of the singular vectors.
    """

    rows: int = 192
    cols: int = 192
    draws: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "cols", "draws"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be >= 1; got {getattr(self, name)}.")


PRESETS = {"quick": [Config()], "paper": [Config(384, 384, 5), Config(384, 1536, 5), Config(768, 768, 5)]}


def measure(config: Config, watch: Watch) -> list[dict[str, Any]]:
    """Relative Frobenius error and largest singular value of each mode on log-spaced spectra."""
    records = []
    short = min(config.rows, config.cols)
    for exponent in range(7):
        for draw_index in range(config.draws):
            generator = stream(config.seed, "vectors", exponent, draw_index)
            u, _ = torch.linalg.qr(torch.randn(config.rows, short, generator=generator, dtype=torch.float64))
            v, _ = torch.linalg.qr(torch.randn(config.cols, short, generator=generator, dtype=torch.float64))
            exact = u @ v.mT
            matrix = ((u * torch.logspace(0, -exponent, short, dtype=torch.float64)) @ v.mT).float()
            for mode in ZOLOTAREV:
                got = polar_factor(matrix, method="zolotarev", mode=mode).double()
                records.append(
                    {
                        "condition": 10.0**exponent, "draw": draw_index, "mode": mode,
                        "error": (torch.linalg.norm(got - exact) / torch.linalg.norm(exact)).item(),
                        "gain": torch.linalg.matrix_norm(got, 2).item(),
                    }
                )  # fmt: skip
    return records


def check(table: pl.DataFrame) -> list[Check]:
    """Errors inside the fitted interval against the equioscillation error, and the largest gain."""
    checks = []
    for mode, (poles, interval) in ZOLOTAREV.items():
        bound = rational_sign(poles, interval).error
        # The largest singular value is only estimated, to 5 %, which moves the interval by as much.
        inside = table.filter(pl.col("mode") == mode, pl.col("condition") <= 0.9 / interval)
        worst = float(inside["error"].max())  # type: ignore[arg-type]
        checks.append(
            Check(
                f"largest error of {mode}, condition up to {0.9 / interval:.0f}", f"<= {bound:.3f}", "10 %",
                f"{worst:.3f}", worst <= 1.1 * bound,
            )
        )  # fmt: skip
    gain = float(table["gain"].max())  # type: ignore[arg-type]
    checks.append(Check("largest singular value of any result", "<= 1.25", "none", f"{gain:.3f}", gain <= 1.25))
    return checks


def draw(table: pl.DataFrame) -> Figure:
    """Error against condition number, one line per mode, with the equioscillation error dashed."""
    figure, axes = plt.subplots(figsize=(4.2, 3.2))
    for mode, colour in zip(ZOLOTAREV, ("#0072B2", "#D55E00"), strict=True):
        rows = table.filter(pl.col("mode") == mode).group_by("condition").agg(pl.col("error").max()).sort("condition")
        poles, interval = ZOLOTAREV[mode]
        axes.loglog(rows["condition"], rows["error"], "o-", color=colour, label=f"{mode}: {poles} poles from {interval:g}")
        axes.axhline(rational_sign(poles, interval).error, color=colour, linestyle="--", linewidth=0.8)
    axes.set(xlabel="condition number", ylabel="relative error to the polar factor", title="Rational polar factor, float32")
    axes.set_ylim(top=3.0)
    axes.legend(loc="upper left")
    return figure
