"""Muon on the blocks with the larger predicted advantage, or routed by the probe: what it is worth over training.

That a larger one-step advantage means more benefit over training is a conjecture; here it is tested.
"""

import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

import matplotlib.pyplot as plt
import numpy as np
import polars as pl
from matplotlib.figure import Figure
from torch import Tensor

from specgrad import gpt
from specgrad.figures._figure import Check, Watch
from specgrad.figures._probe import CODE, Side, hidden_parameters, optimizer_of, train
from specgrad.gpt.model import Mlp
from specgrad.gpt.observables import sequence_losses
from specgrad.probe import Probe

PAPER = "davis2025"
FIGURE = "not in the paper: routing by a one-step advantage"
EXPERIMENT = "probe-adaptive"
MINUTES = {"quick": 0.2, "paper": 17}

Strategy = Literal["adamw", "worst-half", "best-half", "adaptive", "muon"]

LABELS = {
    "adamw": "AdamW everywhere",
    "worst-half": "Muon on the worst half",
    "best-half": "Muon on the best half",
    "adaptive": "adaptive Muon",
    "muon": "Muon on all hidden matrices",
}
_COLOURS = {"adamw": "#6E6E6E", "worst-half": "#D55E00", "best-half": "#009E73", "adaptive": "#CC79A7", "muon": "#0072B2"}
_MARKERS = {"adamw": "s", "worst-half": "v", "best-half": "^", "adaptive": "D", "muon": "o"}

# Labels drawn per decision: a ranking takes many, the question whether an advantage of 2 to 3 exceeds 1 takes few.
_DRAWS = {"adaptive": 4, "best-half": 16, "worst-half": 16}

# Time of the adaptive optimizer over full Muon's, which takes the same steps unless a block changes sides.
_LONGEST = 1.3
_TIMED = ("adaptive", "muon")

# Windows of the running validation curve and of the final loss.
_RUNNING, _FINAL = 64, 512

__all__ = ["CODE", "EXPERIMENT", "FIGURE", "MINUTES", "PAPER", "PRESETS", "Config", "check", "draw", "measure"]


@dataclass(frozen=True)
class Config:
    """One training run.

    Attributes:
        strategy: ``adamw``, ``muon`` (all hidden matrices), ``adaptive`` (Muon with ``adapt=probe``), ``best-half`` or
            ``worst-half`` (AdamW until the burn-in, then Muon on the half of the hidden matrices with the largest or
            smallest predicted advantage).
        size: size of the decoder.
        mlp: ``relu2`` or ``swiglu``.
        steps: optimizer steps.
        burn_in: first decision.
        decide_every: steps between decisions after it.
        seed: seed of weights and batches.
    """

    strategy: Strategy = "adaptive"
    size: str = "small"
    mlp: Mlp = "relu2"
    steps: int = 400
    burn_in: int = 40
    decide_every: int = 120
    seed: int = 0

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise ValueError(f"`strategy` must be one of {', '.join(get_args(Strategy))}; got {self.strategy!r}.")
        if self.burn_in < 1 or self.decide_every < 1 or self.steps < 1:
            raise ValueError(
                f"`steps`, `burn_in`, `decide_every` must be >= 1; got {self.steps}, {self.burn_in}, {self.decide_every}."
            )


PRESETS = {
    "quick": [Config(s, "tiny", "relu2", 150, 20, 60) for s in get_args(Strategy)],
    "paper": [Config(s, mlp=mlp, seed=seed) for seed in range(3) for mlp in ("relu2", "swiglu") for s in get_args(Strategy)],
}


def measure(config: Config, watch: Watch) -> list[dict[str, Any]]:
    """Trains; records the running validation loss, the final one, and how many matrices took spectral steps."""
    task = gpt.Task(size=config.size, mlp=config.mlp, seed=config.seed)
    recipe = gpt.Recipe("adamw", *gpt.tuned_rates("adamw", config.mlp), steps=config.steps)
    model = task.model()
    hidden = hidden_parameters(model)
    probe = Probe(model, every=config.steps + 1)
    start = Side(frozenset(map(id, hidden.values())) if config.strategy in ("muon", "adaptive") else frozenset())
    optimizer = optimizer_of(model, config.mlp, start, config.steps)
    optimizer.reroute()
    running = task.validation_windows(_RUNNING)
    every = max(1, config.steps // 20)
    records: list[dict[str, Any]] = []
    seconds, began = 0.0, time.process_time()

    def decide(step: int, batch: Tensor) -> None:
        draws = _DRAWS[config.strategy]
        found = probe.measure_advantage(batch[:, :-1], batch[:, 1:], pattern="attention|mlp", seed=step, draws=draws)
        if config.strategy == "adaptive":
            optimizer.adapt = probe
        else:
            order = sorted((row["advantage"], row["layer"]) for row in found if not row["reason"])
            half = order[len(order) // 2 :] if config.strategy == "best-half" else order[: len(order) // 2]
            optimizer.adapt = Side(frozenset(id(hidden[name]) for _, name in half))
        optimizer.reroute()

    def before(step: int, batch: Tensor) -> None:
        nonlocal seconds, began
        deciding = config.strategy in ("adaptive", "best-half", "worst-half")
        if deciding and step >= config.burn_in and (step - config.burn_in) % config.decide_every == 0:
            decide(step, batch)
        if step % every == 0:
            seconds += time.process_time() - began
            spectral = sum(len(g["params"]) for g in optimizer.param_groups if g["update"] == "spectral")
            loss = float(sequence_losses(model, running).mean())
            records.append({"step": step, "val_loss": loss, "seconds": seconds, "spectral": spectral})
            began = time.process_time()

    train(task, model, optimizer, recipe, before, watch.finished)
    seconds += time.process_time() - began
    final = sequence_losses(model, task.validation_windows(_FINAL))
    spectral = sum(len(g["params"]) for g in optimizer.param_groups if g["update"] == "spectral")
    loss = {"val_loss": float(final.mean()), "final": True}
    return [*records, {"step": config.steps, "seconds": seconds, "spectral": spectral} | loss]


def _finals(table: pl.DataFrame, strategy: str) -> np.ndarray:
    rows = table.filter(pl.col("strategy") == strategy, pl.col("final").fill_null(False)).sort("mlp", "seed")
    return rows["val_loss"].to_numpy()


def _at_equal_time(table: pl.DataFrame) -> dict[str, np.ndarray]:
    """Running validation loss when the fastest strategy of the same seed and MLP has finished, by interpolation."""
    out: dict[str, list[float]] = {}
    for group in table.filter(~pl.col("final").fill_null(False)).partition_by("mlp", "seed", maintain_order=True):
        curves = {g["strategy"][0]: g.sort("seconds") for g in group.partition_by("strategy", maintain_order=True)}
        time_left = min(float(c["seconds"].max()) for c in curves.values())  # type: ignore[arg-type]
        for strategy, curve in curves.items():
            out.setdefault(strategy, []).append(float(np.interp(time_left, curve["seconds"], curve["val_loss"])))
    return {strategy: np.array(values) for strategy, values in out.items()}


def _not_above(name: str, first: np.ndarray, second: np.ndarray) -> Check:
    """A check on the mean of paired differences ``first - second``, within two standard errors."""
    difference = first - second
    error = float(difference.std(ddof=1) / np.sqrt(len(difference))) if len(difference) > 1 else float("nan")
    mean = float(difference.mean())
    slack = 2 * error if np.isfinite(error) else 0.02
    shown = f"{mean:+.4f}" + (f" ± {error:.4f} nats per byte" if np.isfinite(error) else " nats per byte, one run")
    tolerance = "two standard errors over seeds and MLPs" if np.isfinite(error) else "0.02 with one run"
    return Check(name, "<= 0", tolerance, shown, mean <= slack)


def check(table: pl.DataFrame) -> list[Check]:
    """Final losses of the adaptive optimizer against both, and of the two halves against each other."""
    timed = _at_equal_time(table)
    seconds = [table.filter(pl.col("strategy") == s).group_by("mlp", "seed").agg(pl.col("seconds").max()) for s in _TIMED]
    slower = float(
        np.median((seconds[0].sort("mlp", "seed")["seconds"] / seconds[1].sort("mlp", "seed")["seconds"]).to_numpy())
    )
    return [
        _not_above("adaptive minus AdamW, equal steps", _finals(table, "adaptive"), _finals(table, "adamw")),
        _not_above("adaptive minus full Muon, equal steps", _finals(table, "adaptive"), _finals(table, "muon")),
        _not_above("adaptive minus AdamW, equal time", timed["adaptive"], timed["adamw"]),
        Check(
            "time of the adaptive optimizer over full Muon's at equal steps",
            f"<= {_LONGEST}",
            "none",
            f"{slower:.2f}; at equal time {np.mean(timed['adaptive'] - timed['muon']):+.4f} nats per byte",
            slower <= _LONGEST,
        ),
        _not_above(
            "conjecture: Muon on the best half minus on the worst half", _finals(table, "best-half"),
            _finals(table, "worst-half"),
        ),
    ]  # fmt: skip


def draw(table: pl.DataFrame) -> Figure:
    """Validation loss below AdamW's: running, by step, and final, by seed."""
    kinds = [m for m in ("relu2", "swiglu") if m in set(table["mlp"])]
    present = [s for s in LABELS if s in set(table["strategy"])]
    figure, grid = plt.subplots(
        1, 2 * len(kinds), figsize=(7.0 if len(kinds) > 1 else 5.5, 3.3), squeeze=False, width_ratios=[2.4, 1] * len(kinds)
    )
    for place, mlp in enumerate(kinds):
        curves, ends = grid[0, 2 * place], grid[0, 2 * place + 1]
        rows = table.filter(pl.col("mlp") == mlp)
        running = rows.filter(~pl.col("final").fill_null(False), pl.col("step") >= pl.col("burn_in"))
        means = running.group_by("strategy", "step").agg(pl.col("val_loss").mean()).sort("step")
        base = dict(means.filter(pl.col("strategy") == "adamw").select("step", "val_loss").iter_rows())
        for i, strategy in enumerate(present):
            look: dict[str, Any] = {"color": _COLOURS[strategy], "marker": _MARKERS[strategy]}
            line = means.filter(pl.col("strategy") == strategy)
            gain = [base[step] - loss for step, loss in line.select("step", "val_loss").iter_rows()]
            wide = {"lw": 3, "alpha": 0.5} if strategy == "adaptive" else {"lw": 1}
            curves.plot(line["step"], gain, ms=2.5, label=LABELS[strategy], **look, **wide)
            finals = _finals(rows, "adamw") - _finals(rows, strategy)
            ends.plot(np.full(len(finals), i), finals, ms=4, ls="", alpha=0.8, mew=0, **look)
        curves.set_title({"relu2": "squared ReLU", "swiglu": "SwiGLU"}[mlp])
        curves.set_xlabel("step")
        ends.set_title("final")
        ends.set_xticks(range(len(present)), labels=[])
        ends.set_xlim(-0.7, len(present) - 0.3)
        ends.set_xlabel("each seed", fontsize=8)
        if place == 0:
            curves.set_ylabel("validation loss below AdamW's\n(nats per byte)")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 if len(kinds) == 1 else 3, fontsize=8)
    return figure
