"""The main job: train three ways on real text, probe on the way, write the report."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from specgrad import gpt
from specgrad.figures import _gpt, gpt_condition, gpt_optimizers
from specgrad.figures._collect import RunsFailed, collect, publish
from specgrad.figures._figure import run_of
from specgrad.figures._gpt import Config
from specgrad.gpt.model import Mlp, Positions
from specgrad.gpt.tuning import tune, write_sweep
from specgrad.report.demo_page import demo_page
from specgrad.report.demo_result import DemoResult, write_tables
from specgrad.runs import Run, Store
from specgrad.runs.tracking import check_tracker

SETTINGS_FILE = "demo.json"


@dataclass(frozen=True)
class DemoOptions:
    """Settings of ``specgrad demo``.

    Attributes:
        out: folder for report, tables, figures and stored runs.
        text: a text file of your own; default: the shipped Shakespeare.
        size: tiny, small, medium or large decoder.
        mlp: relu2 (squared ReLU) or swiglu (gated).
        positions: rotary or learned positions.
        steps: optimizer steps of each of the three runs.
        batch_size: sequences per step.
        adamw_lr: AdamW's learning rate; default: the tuned one of each run.
        muon_lr: Muon's learning rate; default: the tuned one of each run.
        weight_decay: decoupled weight decay of the hidden matrices.
        probe_every: steps between measurements of ranks and validation loss.
        device: device of the models, such as cpu or cuda.
        dtype: float32, float64 or bfloat16.
        seed: seed of weights and batches, the same for all three runs.
        tune: repeat the learning-rate sweep first, and use what it finds.
        track: where records go as they come: jsonl:FOLDER, tensorboard:FOLDER, wandb:PROJECT or mlflow:EXPERIMENT.
    """

    out: Path = Path("specgrad-demo")
    text: Path | None = None
    size: str = "small"
    mlp: Mlp = "relu2"
    positions: Positions = "rotary"
    steps: int = 400
    batch_size: int = 16
    adamw_lr: float | None = None
    muon_lr: float | None = None
    weight_decay: float = 0.0
    probe_every: int = 20
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0
    tune: bool = False
    track: str | None = None

    def configs(self) -> list[Config]:
        """The three runs; raises ValueError for a setting out of range."""
        shared = {key: value for key, value in asdict(self).items() if key not in ("out", "tune", "track")}
        return _gpt.comparison(**shared)


def saved_options(out: Path) -> DemoOptions:
    """Options of the last demo in a folder, for ``--resume``; the folder may have been moved since.

    Raises:
        ValueError: if no demo was started there, or its settings cannot be read.
    """
    file = out / SETTINGS_FILE
    if not file.is_file():
        raise ValueError(f"`out` must hold an earlier demo to resume; got {str(out)!r}, which has no {SETTINGS_FILE}.")
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        text = Path(saved["text"]) if saved["text"] is not None else None
        return DemoOptions(**(saved | {"out": out, "text": text}))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} must hold the settings of a demo of this version; it cannot be read ({error}).") from error


def run_demo(options: DemoOptions) -> DemoResult:
    """Does what is missing, then writes ``report.html``, ``tables/`` and ``figures/`` into the output folder.

    Args:
        options: settings; checked before anything is trained.

    Returns:
        The result, with the path of the report.

    Raises:
        ValueError: for a setting out of range, a missing or short text, or a folder that cannot be written.
        RunsFailed: if a run failed, as when the training loss is not finite.
        RunsMissing: after Ctrl-C; finished runs and the state of the one in progress are kept.
    """
    configs = options.configs()
    if options.track is not None:
        check_tracker(options.track)
    store = Store(options.out / "runs")
    settings = {key: str(v.resolve()) if isinstance(v, Path) else v for key, v in asdict(options).items() if key != "out"}
    (options.out / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if options.tune:
        configs = _tuned(options, configs, store)
    # Whoever repeats a failed demo wants it tried again.
    table = _collect(configs, store, _label, retry_failed=True, track=options.track)
    figures = options.out / "figures"
    checks = publish(gpt_optimizers, table, figures, "losses") + publish(gpt_condition, table, figures, "condition")
    result = DemoResult.of(options.out / "report.html", table, checks, [store.about(run_of(_gpt, c)) for c in configs])
    write_tables(result, options.out / "tables")
    result.path.write_text(demo_page(result, figures, options), encoding="utf-8")
    return result


def _collect(
    configs: list[Config], store: Store, label: Callable[[Run], str], *, retry_failed: bool, track: str | None = None
) -> pl.DataFrame:
    # One run after the other on all threads.
    return collect(_gpt, configs, store, threads=None, retry_failed=retry_failed, track=track, label=label)


def _label(run: Run) -> str:
    return gpt.LABELS[run.config["update"]]


def _tuned(options: DemoOptions, configs: list[Config], store: Store) -> list[Config]:
    """Repeats the sweep through the store and puts the rates it found into the configurations."""
    rows: list[dict[str, Any]] = []

    def measure_recipe(recipe: gpt.Recipe) -> float:
        config = replace(
            configs[0], update=recipe.update, adamw_lr=recipe.adamw_lr, muon_lr=recipe.muon_lr,
            probe_every=options.steps,
        )  # fmt: skip
        try:
            table = _collect([config], store, lambda run: f"sweep: {_label(run)}", retry_failed=False)
        except RunsFailed as error:
            print(error, file=sys.stderr)
            return float("inf")
        return float(table.filter(table["step"] == options.steps)["val_loss"][0])

    for row in tune(measure_recipe, options.steps, options.mlp):
        about = {"size": options.size, "seed": options.seed, "text": configs[0].task.config()["text"]}
        rows.append(about | row)
        write_sweep(options.out / "tuning.csv", rows)
        rates = f"AdamW {row['adamw_lr']:g}" + (f", Muon {row['muon_lr']:g}" if row["update"] != "adamw" else "")
        print(f"sweep: {gpt.LABELS[row['update']]} at {rates}: validation loss {row['val_loss']:.4f}", file=sys.stderr)
    tuned = []
    for config in configs:
        adamw_lr, muon_lr = gpt.tuned_rates(config.update, options.mlp, rows)
        tuned.append(replace(config, adamw_lr=adamw_lr, muon_lr=muon_lr))
    return tuned
