"""The exact solution gives the time to weak recovery for every rank of student and teacher, without a simulation.

Time until ``p12 = level p22``, with the initial slope of Corollary 3 as its small-overlap limit.
"""

from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from specgrad import aim
from specgrad.figures import _aim
from specgrad.figures._figure import Check, Watch

PAPER = _aim.PAPER
FIGURE = "phase diagram of weak recovery over the ranks, from the exact solution (not in the paper)"
EXPERIMENT = "aim-phase-diagram"
CODE = (*_aim.CODE, "specgrad.figures.aim_phase_diagram")
MINUTES = {"quick": 0.1, "paper": 5}

# Overlap at which the initial slope must give the time to within the stated tolerance.
_SMALL = 1e-3


@dataclass(frozen=True)
class Config:
    """A grid of ranks for one activation.

    Attributes:
        activation: an elementwise activation, or softmax.
        points: ranks on each axis, log-spaced from 0.1 d to 2 d.
        level: overlap ``p12/p22`` that counts as recovered.
        variance: variance of the scores of student and teacher at the start, which fixes their scales.
        t_max: longest time, in units ``4 lr n/d``.
        seed: part of the run's name; nothing is random.
    """

    activation: str = "h2"
    points: int = 9
    level: float = 0.5
    variance: float = 1.0
    t_max: float = 20.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.points < 2:
            raise ValueError(f"`points` must be >= 2; got {self.points}.")
        if not self.variance > 0:
            raise ValueError(f"`variance` must be > 0; got {self.variance}.")
        if not 0 < self.level < 1:
            raise ValueError(f"`level` must lie between 0 and 1; got {self.level}.")
        _ = self.task(1.0, 1.0)

    def task(self, student_ratio: float, teacher_ratio: float) -> aim.Task:
        """The task of the lab at one point of the grid."""

        def scale(ratio: float) -> float:
            # The variance is 2 tr(S^2) = 2 ratio (1 + ratio) scale^2.
            return float(np.sqrt(self.variance / (2 * ratio * (1 + ratio))))

        return aim.Task(
            student_ratio=student_ratio, teacher_ratio=teacher_ratio, student_scale=scale(student_ratio),
            teacher_scale=scale(teacher_ratio),
            activation=self.activation, tokens=_aim.tokens_of(self.activation),
        )  # fmt: skip


PRESETS = {
    "quick": [Config("h1"), Config("h2")],
    "paper": [Config(name, points=25) for name in ("h1", "h2", "tanh")],
}


def measure(config: Config, watch: Watch) -> list[dict[str, Any]]:
    """Times to small and to weak recovery over the grid."""
    ratios = np.geomspace(0.1, 2.0, config.points).tolist()
    times = np.concatenate([[0.0], np.geomspace(1e-6, config.t_max, 500)])
    records = []
    for student in ratios:
        for teacher in ratios:
            task = config.task(student, teacher)
            out = aim.solve(task, "exact", t_eval=times, rtol=1e-7)
            p22 = float(out["p22"][0])
            slope = aim.initial_slope(task)["dp12"]
            records.append({
                "student": student, "teacher": teacher, "time": float(aim.recovery_time(out, config.level)),
                "small": float(aim.recovery_time(out, _SMALL)), "linear": _SMALL * p22 / abs(slope) if slope else np.nan,
                "final": float(out["p12"][-1] / p22), "final_loss": float(out["loss"][-1]),
            })  # fmt: skip
        watch.finished(len(records), records[-1]["time"])
    return records


def check(table: pl.DataFrame) -> list[Check]:
    """Small-overlap times against the initial slope, and recovery wherever the student's rank allows it."""
    checks = []
    for activation in table["activation"].unique(maintain_order=True).to_list():
        rows = table.filter(pl.col("activation") == activation)
        ratio = rows["small"].to_numpy() / rows["linear"].to_numpy()
        middle = float(np.median(np.abs(ratio - 1)))
        name = f"{activation}: time to {_SMALL:.1%} overlap against Corollary 3, median deviation"
        checks.append(_aim.at_most(name, middle, 0.1))
        able = rows.filter(pl.col("student") >= pl.col("teacher"))
        missed = int(able["time"].is_nan().sum())
        name = f"{activation}: points with student rank >= teacher rank that do not recover"
        checks.append(Check(name, "0", "none", f"{missed} of {able.height}", missed == 0))
    return checks


def draw(table: pl.DataFrame) -> Figure:
    """One map per activation: recovery time, grey where half of the teacher is out of reach."""
    names = table["activation"].unique(maintain_order=True).to_list()
    figure, panels = plt.subplots(1, len(names), figsize=(1.2 + 2.7 * len(names), 3.2), sharey=True, squeeze=False)
    finite = table.filter(pl.col("time").is_not_nan())["time"].to_numpy()
    norm = LogNorm(finite.min(), finite.max())
    for axes, activation in zip(panels[0], names, strict=True):
        rows = table.filter(pl.col("activation") == activation).sort("teacher", "student")
        students, teachers = (np.array(sorted(set(rows[c].to_list()))) for c in ("student", "teacher"))
        grid = rows["time"].to_numpy().reshape(len(teachers), len(students))
        axes.set_facecolor("#cccccc")
        image = axes.pcolormesh(students, teachers, np.ma.masked_invalid(grid), norm=norm, cmap="viridis", shading="nearest")
        axes.plot([0.1, 2], [0.1, 2], color="white", linewidth=0.8, linestyle="--")
        axes.set(xscale="log", yscale="log", xlabel="student rank / d", title=activation)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(FixedLocator([0.1, 0.2, 0.5, 1, 2]))
            axis.set_major_formatter(FixedFormatter(["0.1", "0.2", "0.5", "1", "2"]))
            axis.set_minor_locator(NullLocator())
        axes.grid(visible=False)
    panels[0, 0].set_ylabel("teacher rank / d")
    bar = figure.colorbar(image, ax=panels[0].tolist())
    bar.set_label("time $4\\alpha n/d$ until $p_{12} = p_{22}/2$\n(grey: not reached)", fontsize=8)
    return figure
