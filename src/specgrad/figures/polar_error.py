"""Every polar method keeps the error it states, from condition number 1 to the end of the interval it was fitted to.

Distance to the float64 polar factor against condition number, and against the number of poles or polynomials.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib.pyplot as plt
import polars as pl
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from specgrad.figures._figure import Check, Watch
from specgrad.linalg import polar_factor
from specgrad.linalg.newton_schulz import polar_newton_schulz
from specgrad.linalg.polar import NEWTON_SCHULZ, ZOLOTAREV, Method, Mode
from specgrad.linalg.remez import optimal_composition
from specgrad.linalg.zolotarev import polar_zolotarev, rational_sign
from specgrad.plots import COLOURS
from specgrad.runs import stream

PAPER = "davis2025"
FIGURE = "kernel of the spectral step"
EXPERIMENT = "polar-error"
CODE = ("specgrad.linalg", "specgrad.figures.polar_error")

# What is compared: method, mode, working dtype.
VARIANTS: tuple[tuple[Method, Mode, torch.dtype | Literal["auto"]], ...] = (
    ("zolotarev", "fast", "auto"),
    ("zolotarev", "robust", "auto"),
    ("newton_schulz", "fast", torch.bfloat16),
    ("newton_schulz", "robust", torch.float32),
    ("eigh", "exact", "auto"),
    ("eigh", "strict", "auto"),
    ("qdwh", "strict", "auto"),
)

# Steps are compared at condition 10^3, inside the interval of the robust settings.
_STEPS_EXPONENT = 3


@dataclass(frozen=True)
class Config:
    """Matrices of one shape with log-spaced singular values.

    Attributes:
        rows: number of rows.
        cols: number of columns.
        draws: matrices per condition number.
        seed: seed of the singular vectors.
    """

    rows: int = 128
    cols: int = 128
    draws: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "cols", "draws"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be >= 1; got {getattr(self, name)}.")


MINUTES = {"quick": 0.05}
CITES = ("nakatsukasa2016", "amsel2025", "jordan2024")
PRESETS = {"quick": [Config()], "paper": [Config(384, 384, 5), Config(384, 1536, 5), Config(768, 768, 5)]}


def measure(config: Config, watch: Watch) -> list[dict[str, Any]]:
    """Relative Frobenius error and largest singular value of each variant, and of growing numbers of steps."""
    records = []
    for exponent in range(7):
        for draw_index in range(config.draws):
            matrix, exact = _matrix(config, exponent, draw_index)
            for method, mode, dtype in VARIANTS:
                got = polar_factor(matrix, method, mode, dtype=dtype)
                about = {"study": "condition", "condition": 10.0**exponent, "method": method, "mode": mode}
                records.append(about | _errors(got, exact))
    for draw_index in range(config.draws):
        matrix, exact = _matrix(config, _STEPS_EXPONENT, draw_index)
        for name, steps, kernel in _growing():
            about = {"study": "steps", "condition": 10.0**_STEPS_EXPONENT, "method": name, "steps": steps}
            records.append(about | _errors(kernel(matrix), exact))
    return records


def _growing() -> Iterator[tuple[str, int, Callable[[Tensor], Tensor]]]:
    """Zolotarev's function with 1 to 5 poles and compositions of 2 to 7 quintics, fitted to the robust interval."""
    for poles in range(1, 6):
        yield "zolotarev", poles, lambda x, poles=poles: polar_zolotarev(x, poles=poles, interval=5e-4)  # type: ignore[misc]
    for steps in range(2, 8):
        polynomials = optimal_composition((5,) * steps, 5e-4, 1.02)
        yield (
            "newton_schulz",
            steps,
            lambda x, polynomials=polynomials: polar_newton_schulz(x, polynomials=polynomials, dtype=torch.float32),  # type: ignore[misc]
        )


def _matrix(config: Config, exponent: int, draw_index: int) -> tuple[Float[Tensor, "m n"], Float[Tensor, "m n"]]:
    """A float32 matrix of condition ``10^exponent`` and the float64 polar factor it was built from."""
    short = min(config.rows, config.cols)
    generator = stream(config.seed, "vectors", exponent, draw_index)
    u, _ = torch.linalg.qr(torch.randn(config.rows, short, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(config.cols, short, generator=generator, dtype=torch.float64))
    spectrum = torch.logspace(0, -exponent, short, dtype=torch.float64)
    return ((u * spectrum) @ v.mT).float(), u @ v.mT


def _errors(got: Float[Tensor, "m n"], exact: Float[Tensor, "m n"]) -> dict[str, float]:
    error = torch.linalg.norm(got.double() - exact) / torch.linalg.norm(exact)
    return {"error": error.item(), "gain": torch.linalg.matrix_norm(got.double(), 2).item()}


def check(table: pl.DataFrame) -> list[Check]:
    """Stated against measured errors up to the end of each interval, and the largest gain of any result."""
    condition = table.filter(pl.col("study") == "condition")
    checks = []
    for mode, (poles, interval) in ZOLOTAREV.items():
        # The largest singular value is only estimated, to 5 %, which moves the interval by as much.
        bound = rational_sign(poles, interval).error
        checks.append(_error_check(condition, "zolotarev", mode, 0.9 / interval, bound))
    for mode, (degrees, interval, safety) in NEWTON_SCHULZ.items():
        # The bound on the largest singular value is at most 1.5 times too large on these spectra.
        error = optimal_composition(degrees, interval, safety)[-1].error
        assert error is not None
        checks.append(_error_check(condition, "newton_schulz", mode, 1 / (1.5 * interval), error))
    checks.append(_error_check(condition, "eigh", "exact", 1e3, 2e-5))
    checks.append(_error_check(condition, "eigh", "strict", 1e3, 2e-6))
    checks.append(_error_check(condition, "qdwh", "strict", 1e3, 2e-6))
    gain = float(condition["gain"].to_numpy().max())
    checks.append(Check("largest singular value of any result", "<= 1.25", "none", f"{gain:.3f}", gain <= 1.25))
    return checks


def _error_check(table: pl.DataFrame, method: str, mode: str, up_to: float, bound: float) -> Check:
    inside = table.filter(pl.col("method") == method, pl.col("mode") == mode, pl.col("condition") <= up_to)
    worst = float(inside["error"].to_numpy().max())
    name = f"largest error of {method} {mode}, condition up to {up_to:.0f}"
    return Check(name, f"<= {bound:.2g}", "10 %", f"{worst:.2g}", worst <= 1.1 * bound)


def draw(table: pl.DataFrame) -> Figure:
    """Left: error against condition number. Right: error against the number of poles or polynomials."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 3.4), sharey=True)
    styles = {"fast": "-", "robust": "--", "exact": "-", "strict": ":"}
    condition = table.filter(pl.col("study") == "condition")
    for method, mode, _ in VARIANTS:
        rows = condition.filter(pl.col("method") == method, pl.col("mode") == mode)
        worst = rows.group_by("condition").agg(pl.col("error").max()).sort("condition")
        left.loglog(
            worst["condition"], worst["error"], styles[mode], marker="o", markersize=3, color=COLOURS[method],
            label=f"{method} {mode}",
        )  # fmt: skip
    left.set(xlabel="condition number", ylabel="relative error to the polar factor", title="By condition")
    for method, label in (("zolotarev", "poles"), ("newton_schulz", "quintics")):
        rows = table.filter(pl.col("study") == "steps", pl.col("method") == method)
        worst = rows.group_by("steps").agg(pl.col("error").max()).sort("steps")
        right.semilogy(worst["steps"], worst["error"], "o-", markersize=3, color=COLOURS[method], label=f"{method}: {label}")
    right.set(xlabel="number of poles or polynomials", title=f"By steps, condition {10**_STEPS_EXPONENT}")
    right.legend(loc="lower left")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure
