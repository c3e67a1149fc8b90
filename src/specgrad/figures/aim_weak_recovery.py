"""Tied attention recovers half of the teacher after a number of samples that grows like d^2 log d.

One sample per step at the largest rate that the limit allows, ``c/(d log d)``.
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
from specgrad.stats import PowerLaw, exponent_check, fit_power_law

PAPER = _aim.PAPER
FIGURE = "weak recovery after Theta(d^2 log d) samples (Corollary 3)"
EXPERIMENT = "aim-weak-recovery"
CODE = (*_aim.CODE, "specgrad.figures.aim_weak_recovery")
MINUTES = {"quick": 0.2}


@dataclass(frozen=True)
class Config:
    """SGD at one dimension until it has recovered.

    Attributes:
        activation: ``h1``, ``tanh`` or another elementwise activation.
        dim: dimension d.
        rate: c of the learning rate ``c/(d log d)``.
        level: overlap ``p12/p22`` that counts as recovered.
        draws: draws of student, teacher and samples.
        seed: first seed of the draws.
    """

    activation: str = "h1"
    dim: int = 64
    rate: float = 0.2
    level: float = 0.5
    draws: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        _aim.check_sizes(self, "dim", "draws")
        if not 0 < self.level < 1:
            raise ValueError(f"`level` must lie between 0 and 1; got {self.level}.")
        _ = self.task

    @property
    def task(self) -> aim.Task:
        """The task of the lab."""
        return aim.Task(dim=self.dim, activation=self.activation)

    @property
    def lr(self) -> float:
        """Learning rate."""
        return float(self.rate / (self.dim * np.log(self.dim)))


def _sizes(dims: tuple[int, ...], **settings: Any) -> list[Config]:
    return [Config(name, dim, **settings) for name in ("h1", "tanh") for dim in dims]


PRESETS = {"quick": _sizes((24, 48, 96)), "paper": _sizes((32, 64, 128, 256, 400), rate=0.1)}


def measure(config: Config, watch: Watch) -> list[dict[str, Any]]:
    """Samples to recovery by draw, and the limit's prediction."""
    long = aim.solve(config.task, "exact", t_eval=np.linspace(0, 6, 1201))
    theory = float(aim.recovery_time(long, config.level))
    times = np.linspace(0, 1.6 * theory, 97)
    seeds = range(config.seed, config.seed + config.draws)
    run = _aim.simulated(config.task, watch, lr=config.lr, batch_size=1, t_eval=times.tolist(), seeds=seeds)
    found = aim.recovery_time(run, config.level)
    per_time = config.dim / (4 * config.lr)
    records = [
        {"source": "sgd", "draw": s, "time": t, "samples": t * per_time, "horizon": float(times[-1]) * per_time}
        for s, t in zip(seeds, found.tolist(), strict=True)
    ]
    return [*records, {"source": "theory", "draw": None, "time": theory, "samples": theory * per_time, "horizon": None}]


def fit(rows: pl.DataFrame) -> PowerLaw:
    """Power law of samples/log d in d; a draw that did not recover counts as lying beyond the horizon."""
    d, samples = (rows[name].to_numpy().astype(float) for name in ("dim", "samples"))
    return fit_power_law(d, np.where(np.isnan(samples), rows["horizon"], samples) / np.log(d), censored=np.isnan(samples))


def check(table: pl.DataFrame) -> list[Check]:
    """The exponent of d beside log d, and the time to recovery at the largest dimension."""
    checks = []
    for activation in table["activation"].unique(maintain_order=True).to_list():
        rows = table.filter(pl.col("activation") == activation)
        sgd = rows.filter(pl.col("source") == "sgd")
        missed = int(sgd["time"].is_nan().sum())
        checks.append(Check(f"{activation}: draws that did not recover", "0", "none", str(missed), missed == 0))
        reached = sgd.filter(pl.col("time").is_not_nan())
        if reached["dim"].n_unique() > 1:
            # Recovery times of small matrices are off by O(1/sqrt(d)) to O(1/d), which bends the line.
            checks.append(exponent_check(f"{activation}: exponent of d in samples/log d", fit(sgd), 2, 0.15))
        largest = reached.filter(pl.col("dim") == reached["dim"].max())
        theory = float(rows.filter(pl.col("source") == "theory")["time"][0])
        ratio, error = float(largest["time"].mean()) / theory, float(largest["time"].std()) / theory / len(largest) ** 0.5  # type: ignore[arg-type]
        dim = int(largest["dim"][0])
        passed = abs(ratio - 1) <= 4 * error + 1 / dim**0.5
        name = f"{activation}: recovery time at d = {dim} over the limit's"
        checks.append(Check(name, "1", f"4 standard errors ({4 * error:.2f}) and d^-1/2", f"{ratio:.3f}", passed))
    return checks


def draw(table: pl.DataFrame) -> Figure:
    """Samples to recovery against d, draws as markers, the limit as a line."""
    figure, axes = plt.subplots(figsize=(4.4, 3.4))
    for activation, marker in zip(table["activation"].unique(maintain_order=True).to_list(), "osv", strict=False):
        rows = table.filter(pl.col("activation") == activation)
        colour = _aim.ACTIVATION_COLOURS.get(activation, "#555555")
        d, mean, error = _aim.mean_and_error(rows.filter(pl.col("source") == "sgd"), "samples", "dim")
        axes.errorbar(
            d, mean, yerr=np.nan_to_num(error), fmt=marker, color=colour, markerfacecolor="none", label=f"SGD, {activation}"
        )
        theory = rows.filter(pl.col("source") == "theory").sort("dim")
        dims = theory["dim"].to_numpy().astype(float)
        grid = np.geomspace(0.9 * dims[0], 1.1 * dims[-1], 50)
        units = float(theory["samples"][0]) / (dims[0] ** 2 * np.log(dims[0]))
        axes.plot(
            grid, units * grid**2 * np.log(grid), color=colour, linewidth=1.1, label=f"limit, {units:.2f} $d^2 \\log d$"
        )
    axes.set(xscale="log", yscale="log", xlabel="dimension $d$", ylabel="samples until $p_{12} = p_{22}/2$")
    ticks = sorted(set(table["dim"].to_list()))
    axes.set_xticks(ticks, [str(d) for d in ticks])
    axes.minorticks_off()
    axes.legend(loc="upper left", fontsize=8)
    return figure
