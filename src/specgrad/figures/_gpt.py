"""The runs behind every figure on small language models: one recipe on one text."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Float

from specgrad import gpt
from specgrad.data import read_text
from specgrad.gpt.model import Mlp, Positions
from specgrad.gpt.recipes import Update
from specgrad.runs import Watch

EXPERIMENT = "gpt"
# What the probe measures in these runs: level 1 alone.
_PROBE = ("probe", "layers", "streams", "inputs", "patches", "gathering", "records", "gradients", "condition")
CODE = ("specgrad.linalg", "specgrad.optim", *(f"specgrad.probe.{name}" for name in _PROBE), "specgrad.gpt")

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Config:
    """One training run.

    Attributes:
        update: ``adamw``, ``muon-out`` (Muon on MLP output matrices) or ``muon`` (on every hidden matrix).
        adamw_lr: learning rate of AdamW; None takes the tuned one.
        muon_lr: learning rate of Muon; None takes the tuned one.
        weight_decay: decoupled weight decay of hidden matrices.
        text: path of a text file; None is the shipped Shakespeare.
        size: ``tiny``, ``small``, ``medium`` or ``large``.
        mlp: ``relu2`` (squared ReLU) or ``swiglu`` (gated).
        positions: ``rotary`` or ``learned``.
        steps: optimizer steps.
        batch_size: sequences per step.
        probe_every: steps between measurements of ranks and validation loss.
        device: device of the model, such as ``cpu`` or ``cuda``.
        dtype: dtype of the weights: ``float32``, ``float64`` or ``bfloat16``.
        seed: seed of weights and batches.
    """

    update: Update = "muon"
    adamw_lr: float | None = None
    muon_lr: float | None = None
    weight_decay: float = 0.0
    text: Path | None = None
    size: str = "small"
    mlp: Mlp = "relu2"
    positions: Positions = "rotary"
    steps: int = 400
    batch_size: int = 16
    probe_every: int = 20
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.probe_every < 1:
            raise ValueError(f"`probe_every` must be >= 1; got {self.probe_every}.")
        if self.dtype not in DTYPES:
            raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}; got {self.dtype!r}.")
        try:
            torch.zeros(1, device=self.device).item()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise ValueError(f"`device` must be available here; got {self.device!r} ({error}).") from error
        _ = self.task, self.recipe

    @cached_property
    def task(self) -> gpt.Task:
        """The task of the gpt lab."""
        text = read_text(self.text) if self.text is not None else None
        return gpt.Task(text, self.size, self.mlp, self.positions, self.batch_size, self.seed)

    @cached_property
    def recipe(self) -> gpt.Recipe:
        """The recipe of the gpt lab, learning rates filled in."""
        adamw_lr, muon_lr = gpt.tuned_rates(self.update, self.mlp)
        return gpt.Recipe(
            self.update,
            adamw_lr if self.adamw_lr is None else self.adamw_lr,
            None if self.update == "adamw" else muon_lr if self.muon_lr is None else self.muon_lr,
            self.weight_decay,
            self.steps,
        )


def identity(config: Config) -> dict[str, Any]:
    """What determines the run's result."""
    settings = {"probe_every": config.probe_every, "device": torch.device(config.device).type, "dtype": config.dtype}
    return config.task.config() | config.recipe.config() | settings


def measure(config: Config, watch: Watch) -> list[dict[str, Any]]:
    """Trains and probes; records as of `specgrad.gpt.simulate`."""
    return gpt.simulate(
        config.task,
        config.recipe,
        probe_every=config.probe_every,
        device=config.device,
        dtype=DTYPES[config.dtype],
        checkpoint=watch.checkpoint,
        on_step=watch.on_step,
        should_stop=watch.should_stop,
        on_record=watch.on_record,
    )


def comparison(**settings: Any) -> list[Config]:
    """The three optimizers under common settings."""
    return [Config(update=update, **settings) for update in ("adamw", "muon-out", "muon")]


def presets() -> dict[str, list[Config]]:
    """``quick`` fits in a minute on two cores; ``paper`` repeats the ablation on three seeds and both kinds of MLP."""
    return {
        "quick": comparison(size="tiny", steps=300, probe_every=30),
        "paper": [c for seed in range(3) for mlp in ("relu2", "swiglu") for c in comparison(mlp=mlp, seed=seed)],
    }


def updates_of(table: pl.DataFrame) -> list[str]:
    """The optimizers in a table, in the expected order of their losses."""
    present = set(table["update"])
    return [update for update in gpt.theory.EXPECTED_ORDER if update in present]


def final_losses(table: pl.DataFrame, update: str) -> Float[np.ndarray, " windows"]:
    """Losses of the final validation windows of one optimizer, all seeds and MLPs after each other."""
    rows = table.filter(pl.col("update") == update, pl.col("sequence_losses").is_not_null()).sort("mlp", "seed")
    return np.concatenate([np.asarray(losses) for losses in rows["sequence_losses"].to_list()])
