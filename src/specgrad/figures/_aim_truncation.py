"""Truncation orders of the moment hierarchy against SGD and the exact curve, for one activation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from matplotlib.figure import Figure

from specgrad import aim
from specgrad.figures import _aim
from specgrad.figures._figure import Check, Watch

EXPERIMENT = "aim-truncation"
CODE = (*_aim.CODE, "specgrad.figures._aim_truncation")

_STYLES = (":", "--", "-.", (0, (5, 1)))


@dataclass(frozen=True)
class Config:
    """SGD on one activation, several draws, and the theories in the limit.

    Attributes:
        activation: ``h1``, ``h2``, ``h3`` or ``tanh`` on one token, ``softmax`` on two.
        dim: dimension d of SGD.
        lr: learning rate.
        batch_size: samples per step.
        t_max: horizon, in units ``4 lr n/d``.
        scale: scale of the factors of student and teacher.
        orders: truncation orders M.
        draws: draws of student, teacher and samples.
        seed: first seed of the draws.
    """

    activation: str = "softmax"
    dim: int = 100
    lr: float = 0.05
    batch_size: int = 512
    t_max: float = 4.0
    scale: float = 1.0
    orders: tuple[int, ...] = (4, 8, 12)
    draws: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        _aim.check_sizes(self, "dim", "batch_size", "draws")
        if len(self.orders) < 2 or list(self.orders) != sorted(set(self.orders)) or self.orders[0] < 2:
            raise ValueError(f"`orders` must list at least two ascending orders >= 2; got {self.orders}.")
        if not self.t_max > 0:
            raise ValueError(f"`t_max` must be > 0; got {self.t_max}.")
        _ = self.task

    @property
    def task(self) -> aim.Task:
        """The task of the lab."""
        return aim.Task(
            dim=self.dim, activation=self.activation, tokens=_aim.tokens_of(self.activation), student_scale=self.scale,
            teacher_scale=self.scale,
        )  # fmt: skip


def measure(config: Config, watch: Watch) -> list[dict[str, Any]]:
    """Order parameters of SGD at 21 times, of the exact solution and of each truncation at 201."""
    times = np.linspace(0.0, config.t_max, 201)
    seeds = range(config.seed, config.seed + config.draws)
    run = _aim.simulated(
        config.task, watch, lr=config.lr, batch_size=config.batch_size, t_eval=times[::10].tolist(), seeds=seeds
    )
    records = _aim.rows_of(run, source="sgd", order=0)
    records += _aim.rows_of(aim.solve(config.task, "exact", t_eval=times), source="exact", order=0)
    for order in config.orders:
        out = aim.solve(config.task, "hierarchy", t_eval=times, order=order, untrusted="keep")
        records += _aim.rows_of(out, source="hierarchy", order=order)
    return records


def time_to_error(table: pl.DataFrame, order: int, level: float = 0.01) -> float:
    """First time at which a truncation is off by ``level`` of the exact (t1, q11, q12)."""
    exact = table.filter(pl.col("source") == "exact").sort("t")
    cut = table.filter(pl.col("source") == "hierarchy", pl.col("order") == order).sort("t")
    errors = [np.abs(cut[c].to_numpy().astype(float) / exact[c].to_numpy() - 1) for c in _aim.QUANTITIES]
    bad = ~(np.max(errors, axis=0) <= level)
    return float(exact["t"][int(np.argmax(bad))]) if bad.any() else float("inf")


def check(table: pl.DataFrame) -> list[Check]:
    """SGD against the exact curve, and how long each truncation is within 1 %."""
    run, exact = (table.filter(pl.col("source") == source) for source in ("sgd", "exact"))
    dim = int(table["dim"][0])
    checks = []
    for column in _aim.QUANTITIES:
        off, error = _aim.worst_deviation(run, exact, column)
        # Traces of one draw are off by O(1/d); the constants of (t1, q11, q12) are below 3.
        tolerance = f"4 standard errors ({4 * error:.1%}) and 3/d"
        checks.append(
            Check(f"largest |SGD - exact| of {column}, relative", "0", tolerance, f"{off:.1%}", off <= 4 * error + 3 / dim)
        )
    orders = sorted(set(table.filter(pl.col("source") == "hierarchy")["order"].to_list()))
    reach = [time_to_error(table, order) for order in orders]
    got = ", ".join(f"M={order}: {time:.3g}" for order, time in zip(orders, reach, strict=True))
    checks.append(Check("time within 1 % grows with the order", "ascending", "none", got, bool(np.all(np.diff(reach) > 0))))
    return checks


def draw(table: pl.DataFrame) -> Figure:
    """One panel per quantity: SGD markers, the exact curve, truncations until they leave the panel."""
    figure, panels = plt.subplots(1, 3, figsize=(7.2, 2.9))
    exact = table.filter(pl.col("source") == "exact").sort("t")
    run = table.filter(pl.col("source") == "sgd")
    orders: Sequence[int] = sorted(set(table.filter(pl.col("source") == "hierarchy")["order"].to_list()))
    for axes, column in zip(panels, _aim.QUANTITIES, strict=True):
        colour = _aim.QUANTITY_COLOURS[column]
        values = exact[column].to_numpy()
        low, high = values.min(), values.max()
        margin = 0.25 * (high - low)
        for order, line in zip(orders, _STYLES, strict=False):
            cut = table.filter(pl.col("source") == "hierarchy", pl.col("order") == order).sort("t")
            shown = np.where(np.abs(cut[column].to_numpy().astype(float)) < 1e3, cut[column].to_numpy(), np.nan)
            axes.plot(cut["t"], shown, linestyle=line, color="#777777", linewidth=1, label=f"order {order}")
        axes.plot(exact["t"], values, color="black", linewidth=1.2, label="exact, d = ∞")
        _aim.points(axes, run, column, colour, "o", f"SGD, d = {table['dim'][0]}")
        axes.set(xlabel="time $4\\alpha n/d$", ylim=(low - margin, high + margin), title=_aim.QUANTITY_LABELS[column])
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return figure
