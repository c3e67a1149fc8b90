"""The population loss reaches its Gaussian limit like 1/d for even losses and like d^-1/2 for others, as its cumulants say.

Monte Carlo at finite d against the limit with corrections from third and fourth cumulants.
"""

from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from specgrad import aim
from specgrad.figures import _aim
from specgrad.figures._figure import Check, Watch
from specgrad.stats import exponent_check, fit_power_law

PAPER = _aim.PAPER
FIGURE = "rate of Theorem 1: finite-dimensional population loss against the Gaussian limit"
EXPERIMENT = "aim-gap"
CODE = (*_aim.CODE, "specgrad.figures.aim_gap")
MINUTES = {"quick": 0.1, "paper": 3}


def skewed(scores: Float[Tensor, "*batch 1 1 2"]) -> Float[Tensor, "*batch"]:
    """``(z_1 + z_1^2/2 - tanh z_2)^2``, which is not even in the scores."""
    z = scores[..., 0, 0, :]
    return (z[..., 0] + z[..., 0] ** 2 / 2 - z[..., 1].tanh()) ** 2


LOSSES = {"even": "(tanh z₁ - tanh z₂)²", "skewed": "(z₁ + z₁²/2 - tanh z₂)²", "softmax": "softmax, two tokens"}


@dataclass(frozen=True)
class Config:
    """One loss at several dimensions.

    Attributes:
        loss: ``even``, ``skewed`` or ``softmax``.
        dims: dimensions.
        samples: Monte Carlo samples at each.
        draws: draws of the matrices, among which the samples are shared out.
        seed: first seed of matrices and samples.
    """

    loss: str = "even"
    dims: tuple[int, ...] = (25, 50, 100, 200)
    samples: int = 200_000
    draws: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(f"`loss` must be one of {', '.join(LOSSES)}; got {self.loss!r}.")
        _aim.check_sizes(self, "draws")
        if self.samples < 1000 * self.draws or min(self.dims) < 2:
            raise ValueError(f"`samples` must be >= 1000 per draw and `dims` >= 2; got {self.samples} and {self.dims}.")

    def task(self, dim: int) -> aim.Task:
        """The task of the lab at one dimension."""
        kinds: dict[str, dict[str, Any]] = {
            "even": {"activation": "tanh"}, "skewed": {"loss": skewed}, "softmax": {"activation": "softmax", "tokens": 2}
        }  # fmt: skip
        settings = kinds[self.loss]
        return aim.Task(dim=dim, student_scale=1.0, teacher_scale=1.0, **settings)


PRESETS = {
    "quick": [Config("even"), Config("skewed")],
    "paper": [Config(name, (25, 50, 100, 200, 400), 2_000_000) for name in LOSSES],
}


def measure(config: Config, watch: Watch) -> list[dict[str, Any]]:
    """Gap, its standard error and the two corrections for each dimension and draw."""
    records = []
    jobs = [(dim, config.seed + draw) for dim in config.dims for draw in range(config.draws)]
    for done, (dim, draw) in enumerate(jobs, start=1):
        task = config.task(dim)
        gap = aim.population_gap(task.potential, task.matrices(draw), samples=config.samples // config.draws, seed=draw)
        about = {"dim": dim, "draw": draw, "limit": gap.limit, "gap": gap.gap, "error": gap.error}
        records.append(about | {"third": gap.third, "fourth": gap.fourth})
        watch.finished(done, gap.gap)
    return records


def _by_dim(table: pl.DataFrame, loss: str) -> pl.DataFrame:
    """Means over draws, with the Monte Carlo error of the mean."""
    rows = table.filter(pl.col("loss") == loss)
    error = (pl.col("error") ** 2).sum().sqrt() / pl.len()
    return rows.group_by("dim").agg(pl.col("gap", "third", "fourth").mean(), error.alias("error")).sort("dim")


def check(table: pl.DataFrame) -> list[Check]:
    """The gap against its corrections at each dimension, and the leading power of d."""
    checks = []
    for loss in table["loss"].unique(maintain_order=True).to_list():
        rows = _by_dim(table, loss)
        d, gap, error, third, fourth = (rows[c].to_numpy() for c in ("dim", "gap", "error", "third", "fourth"))
        off = np.abs(gap - third - fourth)
        # The next terms are smaller by d^-1/2 than the last one kept; their size is taken as ten times that.
        allowed = 4 * error + 10 * np.abs(fourth) / d**0.5
        worst = int(np.argmax(off / allowed))
        name = f"{loss}: gap minus corrections, worst at d = {d[worst]}"
        tolerance = "4 standard errors and 10 d^-1/2 of the last term"
        checks.append(
            Check(name, "0", f"{tolerance}, {allowed[worst]:.2g}", f"{off[worst]:.2g}", bool(off[worst] <= allowed[worst]))
        )
        leading = third if np.abs(third[-1]) > 1e-9 else fourth
        law = fit_power_law(d, np.abs(leading))
        wanted = -0.5 if np.abs(third[-1]) > 1e-9 else -1.0
        name = f"{loss}: power of d of the leading correction"
        checks.append(exponent_check(name, law, wanted, 0.15))
    return checks


def draw(table: pl.DataFrame) -> Figure:
    """Size of the gap against d: Monte Carlo markers, corrections as lines."""
    names = table["loss"].unique(maintain_order=True).to_list()
    figure, axes = plt.subplots(figsize=(4.6, 3.5))
    colours = {"even": "#0072B2", "skewed": "#D55E00", "softmax": "#009E73"}
    for loss, marker in zip(names, "osv", strict=False):
        rows = _by_dim(table, loss)
        colour = colours[loss]
        gap, total = rows["gap"].abs(), (rows["third"] + rows["fourth"]).abs()
        axes.errorbar(
            rows["dim"], gap, yerr=rows["error"], fmt=marker, color=colour, markerfacecolor="none", label=LOSSES[loss]
        )
        axes.plot(rows["dim"], total, color=colour, linewidth=1.2)
        if float(rows["third"].abs().max()) > 1e-9:  # type: ignore[arg-type]
            axes.plot(rows["dim"], rows["third"].abs(), color=colour, linewidth=1, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="dimension $d$", ylabel=r"$|E_x\,\mathcal{L} - E\,\mathcal{L}(G)|$")
    dims = sorted(set(table["dim"].to_list()))
    axes.set_xticks(dims, [str(d) for d in dims])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.plot([], [], color="#555555", linewidth=1.2, label="third and fourth cumulants")
    axes.plot([], [], color="#555555", linewidth=1, linestyle=":", label="third cumulants alone")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure
