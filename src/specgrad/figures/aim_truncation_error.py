"""The error of the truncated hierarchy falls with its order up to a radius in time; the operator closure has no such end.

Relative error of (t1, q11, q12) against the exact solution at infinite dimension.
"""

from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from matplotlib.figure import Figure

from specgrad import aim
from specgrad.figures import _aim
from specgrad.figures._figure import Check, Watch

PAPER = _aim.PAPER
FIGURE = "truncation error of Corollary 2 against order and time, and of the operator closure"
EXPERIMENT = "aim-truncation-error"
CODE = (*_aim.CODE, "specgrad.figures.aim_truncation_error")
MINUTES = {"quick": 0.05, "paper": 0.1}

# Times by which truncations of the linear activation at scale 1 are off by 1 %, known from an independent implementation.
_KNOWN_TIMES = {4: 0.016, 6: 0.030, 8: 0.038, 12: 0.049, 16: 0.054}

# Largest error of the closure against matrix flows at d = 100 to 150.
_KNOWN_CLOSURE = {2: 0.04, 3: 0.022, 4: 0.013}


@dataclass(frozen=True)
class Config:
    """Truncations and closures of one activation.

    Attributes:
        activation: ``h1``, ``h2``, ``h3`` or ``softmax``.
        scale: scale of the factors of student and teacher.
        t_max: horizon, in units ``4 lr n/d``.
        orders: truncation orders M.
        closures: orders m of the closure.
        points: number of times.
        seed: part of the run's name; nothing is random.
    """

    activation: str = "h1"
    scale: float = 1.0
    t_max: float = 0.3
    orders: tuple[int, ...] = (4, 6, 8, 12)
    closures: tuple[int, ...] = (2, 3, 4)
    points: int = 151
    seed: int = 0

    def __post_init__(self) -> None:
        if self.points < 3 or not self.t_max > 0:
            raise ValueError(f"`points` must be >= 3 and `t_max` > 0; got {self.points} and {self.t_max}.")
        _ = self.task

    @property
    def task(self) -> aim.Task:
        """The task of the lab."""
        return aim.Task(
            activation=self.activation, tokens=_aim.tokens_of(self.activation), student_scale=self.scale,
            teacher_scale=self.scale,
        )  # fmt: skip


PRESETS = {
    "quick": [Config(), Config("softmax", t_max=6.0)],
    "paper": [
        Config(orders=(4, 6, 8, 12, 16), closures=(2, 3, 4, 5)),
        Config("h2", scale=0.5, orders=(4, 6, 8, 12, 16), closures=(2, 3, 4, 5)),
        Config("h3", scale=0.5, orders=(4, 6, 8, 12, 16), closures=(2, 3, 4, 5)),
        Config("softmax", t_max=6.0, orders=(4, 6, 8, 12), closures=(2, 3, 4)),
    ],
}


def measure(config: Config, watch: Watch) -> list[dict[str, Any]]:
    """Largest relative error of (t1, q11, q12) by method, order and time."""
    times = np.linspace(0, config.t_max, config.points)
    exact = aim.solve(config.task, "exact", t_eval=times, rtol=1e-10)
    radius = float("nan")
    records = []
    jobs = [("hierarchy", m) for m in config.orders] + [("closure", m) for m in config.closures]
    for done, (method, order) in enumerate(jobs, start=1):
        out = aim.solve(config.task, method, t_eval=times, order=order, untrusted="keep")
        radius = out["radius"] if method == "hierarchy" else radius
        with np.errstate(invalid="ignore"):
            error = np.max([np.abs(out[c] / exact[c] - 1) for c in _aim.QUANTITIES], axis=0)
        rows = zip(times.tolist(), error.tolist(), strict=True)
        records += [{"method": method, "order": order, "t": t, "error": e, "radius": radius} for t, e in rows]
        watch.finished(done, float(np.nanmin(error)))
    return records


def _first(table: pl.DataFrame, level: float) -> float:
    rows = table.sort("t")
    bad = ~(rows["error"].to_numpy().astype(float) <= level)
    if not bad.any():
        return float("inf")
    i = int(np.argmax(bad))
    t, e = rows["t"].to_numpy()[i - 1 : i + 1], rows["error"].to_numpy()[i - 1 : i + 1]
    return float(t[0] + (level - e[0]) / (e[1] - e[0]) * (t[1] - t[0])) if np.isfinite(e).all() else float(t[1])


def check(table: pl.DataFrame) -> list[Check]:
    """Times to 1 % of the linear activation, growth with the order, and the closure's largest error."""
    checks = []
    for activation in table["activation"].unique(maintain_order=True).to_list():
        rows = table.filter(pl.col("activation") == activation)
        cuts = rows.filter(pl.col("method") == "hierarchy")
        orders = sorted(set(cuts["order"].to_list()))
        reach = {order: _first(cuts.filter(pl.col("order") == order), 0.01) for order in orders}
        listed = ", ".join(f"M={m}: {t:.3g}" for m, t in reach.items())
        grows = bool(np.all(np.diff(list(reach.values())) > 0))
        checks.append(Check(f"{activation}: time within 1 % grows with the order", "ascending", "none", listed, grows))
        if activation == "h1":
            for order in orders:
                if order in _KNOWN_TIMES:
                    known, got = _KNOWN_TIMES[order], reach[order]
                    passed = abs(got / known - 1) <= 0.1
                    checks.append(Check(f"h1: time within 1 %, order {order}", f"{known}", "10 %", f"{got:.4f}", passed))
        closures = rows.filter(pl.col("method") == "closure")
        for order in sorted(set(closures["order"].to_list())):
            if order in _KNOWN_CLOSURE:
                worst = float(closures.filter(pl.col("order") == order)["error"].to_numpy().max())
                checks.append(
                    _aim.at_most(f"{activation}: largest error of the closure, m = {order}", worst, _KNOWN_CLOSURE[order])
                )
    return checks


def draw(table: pl.DataFrame) -> Figure:
    """One panel per activation: error of (t1, q11, q12) against time, truncations grey to black, closures in colour."""
    names = table["activation"].unique(maintain_order=True).to_list()
    columns = min(2, len(names))
    lines = -(-len(names) // columns)
    size = (1.0 + 3.1 * columns, 0.7 + 2.6 * lines)
    figure, panels = plt.subplots(lines, columns, figsize=size, sharey=True, squeeze=False)
    for axes in panels.flat[len(names) :]:
        axes.set_visible(False)
    colours = {2: "#56B4E9", 3: "#0072B2", 4: "#009E73", 5: "#CC79A7"}
    for axes, activation in zip(panels.flat, names, strict=False):
        rows = table.filter(pl.col("activation") == activation)
        orders = sorted(set(rows.filter(pl.col("method") == "hierarchy")["order"].to_list()))
        for place, order in enumerate(orders):
            cut = rows.filter(pl.col("method") == "hierarchy", pl.col("order") == order).sort("t")
            grey = str(0.75 * (1 - place / max(1, len(orders) - 1)))
            error = cut["error"].to_numpy().astype(float)
            axes.semilogy(cut["t"], np.where(error < 30, error, np.nan), color=grey, linewidth=1.2, label=f"order {order}")
        for order in sorted(set(rows.filter(pl.col("method") == "closure")["order"].to_list())):
            found = rows.filter(pl.col("method") == "closure", pl.col("order") == order).sort("t")
            axes.semilogy(
                found["t"], found["error"], "--", color=colours.get(order), linewidth=1.4, label=f"closure {order}"
            )
        radius = float(rows["radius"].drop_nans()[0])
        axes.axvline(radius, color="#D55E00", linewidth=0.8, linestyle=":")
        axes.text(radius, 3e-8, " estimated radius", color="#D55E00", fontsize=8)
        axes.set(xlabel="time $4\\alpha n/d$", title=activation, ylim=(1e-8, 10), xlim=(0, None))
    for axes in panels[:, 0]:
        axes.set_ylabel("largest relative error")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure
