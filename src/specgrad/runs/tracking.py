"""Records of a run as they come: JSON lines, TensorBoard, Weights & Biases, MLflow behind one callback."""

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from specgrad.runs.watch import OnRecord

# What has to be importable for each kind, and what brings it.
KINDS = {
    "jsonl": ("json", ""),
    "tensorboard": ("torch.utils.tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
}


class Tracker:
    """An ``on_record(step, record)`` callback that has to be closed; a context manager."""

    def __init__(self, on_record: OnRecord, close: Callable[[], None]) -> None:
        self._on_record, self._close = on_record, close

    def __call__(self, step: int, record: dict[str, Any]) -> None:
        """Passes a record on."""
        self._on_record(step, record)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Flushes and closes."""
        self._close()


def check_tracker(spec: str) -> tuple[str, str]:
    """Kind and target of a spec, once it is known that they can be used.

    Raises:
        ValueError: for an unknown kind or a missing target.
        ModuleNotFoundError: if the kind's library is not installed, with the command that installs it.
    """
    kind, _, target = spec.partition(":")
    if kind not in KINDS or not target:
        raise ValueError(
            f"`track` must be jsonl:FOLDER, tensorboard:FOLDER, wandb:PROJECT or mlflow:EXPERIMENT; got {spec!r}."
        )
    module, package = KINDS[kind]
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"`track` = {spec!r} needs {package} (missing: {error.name}). Run: pip install {package}", name=error.name
        ) from error
    return kind, target


def tracker(spec: str, name: str, config: dict[str, Any] | None = None) -> Tracker:
    """Opens what a spec names for one run.

    A record that belongs to a layer (it has a text ``layer``) is logged as ``layer/quantity``. JSON lines hold whole
    records; the other kinds take its numbers.

    Args:
        spec: ``jsonl:FOLDER`` (a file ``name.jsonl``, continued if it exists), ``tensorboard:FOLDER``, ``wandb:PROJECT`` or
            ``mlflow:EXPERIMENT``.
        name: name of the run.
        config: settings to be shown with it.

    Raises:
        ValueError: for an unknown kind or a missing target.
        ModuleNotFoundError: if the kind's library is not installed.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with tracker(f"jsonl:{folder}", "first") as on_record:
        ...     on_record(0, {"loss": 0.5})
        >>> print(open(f"{folder}/first.jsonl").read(), end="")
        {"step": 0, "loss": 0.5}
    """
    kind, target = check_tracker(spec)
    openers: dict[str, Callable[[str, str, dict[str, Any]], Tracker]] = {
        "jsonl": _jsonl, "tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow,
    }  # fmt: skip
    return openers[kind](target, name, config or {})


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record, under ``layer/quantity`` where it belongs to a layer; without the step."""
    prefix = f"{record['layer']}/" if isinstance(record.get("layer"), str) else ""
    return {
        f"{prefix}{name}": float(value)
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float) and value is not None
    }


def _jsonl(folder: str, name: str, config: dict[str, Any]) -> Tracker:
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = (Path(folder) / f"{name}.jsonl").open("a", encoding="utf-8")

    def on_record(step: int, record: dict[str, Any]) -> None:
        # One write per line, so that whoever reads along sees whole lines.
        file.write(json.dumps({"step": step} | record) + "\n")
        file.flush()

    return Tracker(on_record, file.close)


def _tensorboard(folder: str, name: str, config: dict[str, Any]) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(Path(folder) / name))
    writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```")

    def on_record(step: int, record: dict[str, Any]) -> None:
        for tag, value in scalars(record).items():
            writer.add_scalar(tag, value, step)

    return Tracker(on_record, writer.close)


def _wandb(project: str, name: str, config: dict[str, Any]) -> Tracker:
    import wandb

    run = wandb.init(project=project, name=name, config=config, reinit="create_new")
    # Layers measured at one step are many records, so the step is a column, not wandb's own counter.
    run.define_metric("*", step_metric="train_step")
    return Tracker(lambda step, record: run.log(scalars(record) | {"train_step": step}), run.finish)


def _mlflow(experiment: str, name: str, config: dict[str, Any]) -> Tracker:
    import mlflow

    client = mlflow.MlflowClient()
    found = client.get_experiment_by_name(experiment)
    identifier = found.experiment_id if found else client.create_experiment(experiment)
    run = client.create_run(identifier, run_name=name).info.run_id
    for key, value in config.items():
        client.log_param(run, key, value)

    def on_record(step: int, record: dict[str, Any]) -> None:
        for tag, value in scalars(record).items():
            # MLflow takes letters, digits and _-./ and space in a name.
            client.log_metric(run, re.sub(r"[^\w\-./ ]", "_", tag), value, step=step)

    return Tracker(on_record, lambda: client.set_terminated(run))
