"""How it is trained: one run of one recipe, probed, resumable."""

import math
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specgrad.gpt.observables import sequence_losses
from specgrad.gpt.recipes import Recipe
from specgrad.gpt.task import Task, loss
from specgrad.probe import Probe
from specgrad.runs.files import atomic, set_aside
from specgrad.runs.interrupt import Interrupted
from specgrad.runs.watch import OnRecord, OnStep

# Windows for the running validation curve, and for the final loss that optimizers are compared by.
_RUNNING_WINDOWS = 64
FINAL_WINDOWS = 1024


def simulate(
    task: Task,
    recipe: Recipe,
    *,
    probe_every: int = 20,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    checkpoint: Path | None = None,
    checkpoint_every: int = 50,
    on_step: OnStep | None = None,
    should_stop: Callable[[], bool] | None = None,
    on_record: OnRecord | None = None,
) -> list[dict[str, Any]]:
    """Trains a fresh decoder and records losses and the probe's measurements.

    A run is a function of task, recipe, device, dtype and number of threads. With ``checkpoint`` it can be stopped and
    continued without changing a bit of the result.

    Args:
        task: what is learned; its seed fixes weights and batches.
        recipe: optimizer and schedule.
        probe_every: probe and validate on steps 0, ``probe_every``, ... and on the last step.
        device: device of the model.
        dtype: dtype of the weights.
        checkpoint: file that holds the state of an unfinished run; continued from if it exists.
        checkpoint_every: steps between checkpoints.
        on_step: called after each step with the number of finished steps and the training loss.
        should_stop: asked after each step; True stops the run.
        on_record: called with the step and each new record.

    Returns:
        Records in the order of training. Each step has one with ``step``, ``train_loss`` (nats per byte) and ``seconds``
        (training time so far, without probing and validation); measured steps have one with ``val_loss`` and
        ``val_stderr`` before the update, and one per layer as `specgrad.probe.Probe.step` gives it. The last record has
        ``step`` equal to the number of steps, the final ``val_loss`` and ``val_stderr``, and ``sequence_losses``.

    Raises:
        Interrupted: if ``should_stop`` said so.
        ValueError: for a setting out of range.
        FloatingPointError: if the training loss is not finite.
    """
    if checkpoint_every < 1:
        raise ValueError(f"`checkpoint_every` of `gpt.simulate` must be >= 1; got {checkpoint_every}.")
    run = _Training(task, recipe, torch.device(device), dtype)
    if checkpoint is not None and checkpoint.exists() and not run.load(checkpoint):
        run = _Training(task, recipe, torch.device(device), dtype)
    running = task.validation_windows(_RUNNING_WINDOWS)
    told = len(run.records)
    with Probe(run.model, every=probe_every, exact=True) as probe:
        probe.resume_at(run.step)
        while run.step < recipe.steps:
            if run.step == recipe.steps - 1:
                probe.measure_now()
            if probe.measuring:
                run.records.append({"step": run.step} | _validation(sequence_losses(run.model, running)))
            train_loss = run.update(timed=not probe.measuring)
            run.records += probe.step()
            told = _tell(run.records, told, on_record)
            if on_step is not None:
                on_step(run.step, train_loss)
            if run.step < recipe.steps:
                stop = should_stop is not None and should_stop()
                if checkpoint is not None and (stop or run.step % checkpoint_every == 0):
                    run.save(checkpoint)
                if stop:
                    raise Interrupted(run.step, checkpoint)
    final = sequence_losses(run.model, task.validation_windows(FINAL_WINDOWS))
    run.records.append({"step": recipe.steps} | _validation(final) | {"sequence_losses": final.tolist()})
    _tell(run.records, told, on_record)
    return run.records


def _tell(records: list[dict[str, Any]], told: int, on_record: OnRecord | None) -> int:
    """Passes on the records that are new; returns their number in all."""
    if on_record is not None:
        for record in records[told:]:
            on_record(record["step"], record)
    return len(records)


class _Training:
    """The state of a run: model, optimizer, records, number of finished steps, training time."""

    def __init__(self, task: Task, recipe: Recipe, device: torch.device, dtype: torch.dtype) -> None:
        self.task, self.recipe, self.device = task, recipe, device
        self.model = task.model(device, dtype)
        self.optimizer = recipe.optimizer(self.model)
        self.base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.records: list[dict[str, Any]] = []
        self.step, self.seconds = 0, 0.0

    def update(self, *, timed: bool) -> float:
        """One optimizer step; returns the training loss, which is also recorded."""
        began = time.perf_counter()
        for group, rate in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = rate * self.recipe.schedule(self.step)
        value = loss(self.model, self.task.batch(self.step).to(self.device))
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        train_loss = value.item()
        if timed:
            self.seconds += time.perf_counter() - began
        if not math.isfinite(train_loss):
            raise FloatingPointError(
                f"the training loss of {self.recipe.update} is {train_loss} at step {self.step}; lower its learning rate "
                f"(AdamW {self.recipe.adamw_lr}, Muon {self.recipe.muon_lr})"
            )
        self.records.append({"step": self.step, "train_loss": train_loss, "seconds": self.seconds})
        self.step += 1
        return train_loss

    def save(self, checkpoint: Path) -> None:
        """Writes the whole state, or leaves the last one in place."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "records": self.records,
            "step": self.step,
            "seconds": self.seconds,
        }
        with atomic(checkpoint) as temporary:
            torch.save(state, temporary)

    def load(self, checkpoint: Path) -> bool:
        """Continues from a state that `save` wrote; a damaged one is set aside with a warning, and False returned."""
        try:
            state = torch.load(checkpoint, map_location=self.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.records, self.step, self.seconds = state["records"], state["step"], state["seconds"]
        except (OSError, RuntimeError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
            set_aside(checkpoint, ValueError(str(error).splitlines()[0] if str(error) else type(error).__name__))
            return False
        return True


def _validation(losses: torch.Tensor) -> dict[str, float]:
    stderr = losses.std() / len(losses) ** 0.5 if len(losses) > 1 else losses.new_tensor(float("nan"))
    return {"val_loss": losses.mean().item(), "val_stderr": stderr.item()}
