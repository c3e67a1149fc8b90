"""How it is trained: one run of one recipe, probed, resumable."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specgrad.gpt.observables import sequence_losses
from specgrad.gpt.recipes import Recipe
from specgrad.gpt.task import Task, loss
from specgrad.probe import Probe

# Windows for the running validation curve, and for the final loss that optimizers are compared by.
_RUNNING_WINDOWS = 64
FINAL_WINDOWS = 1024


class Interrupted(Exception):
    """Training was asked to stop; everything up to ``step`` is in the checkpoint."""

    def __init__(self, step: int, checkpoint: Path | None) -> None:
        super().__init__(f"stopped before step {step}")
        self.step = step
        self.checkpoint = checkpoint


def simulate(
    task: Task,
    recipe: Recipe,
    *,
    probe_every: int = 20,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    checkpoint: Path | None = None,
    checkpoint_every: int = 50,
    on_step: Callable[[int, float], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
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
    model = task.model(device, dtype)
    optimizer = recipe.optimizer(model)
    base_rates = [float(group["lr"]) for group in optimizer.param_groups]
    records: list[dict[str, Any]] = []
    start, seconds = 0, 0.0
    if checkpoint is not None and checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start, seconds, records = saved["step"], saved["seconds"], saved["records"]

    def save(step: int) -> None:
        if checkpoint is not None:
            state = {
                "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "step": step, "seconds": seconds, "records": records,
            }  # fmt: skip
            temporary = checkpoint.with_suffix(f".{os.getpid()}.tmp")
            torch.save(state, temporary)
            temporary.replace(checkpoint)

    running = task.validation_windows(_RUNNING_WINDOWS)
    with Probe(model, every=probe_every) as probe:
        probe.resume_at(start)
        for step in range(start, recipe.steps):
            if step == recipe.steps - 1:
                probe.measure_now()
            if probe.measuring:
                records.append({"step": step} | _validation(sequence_losses(model, running)))
            began = time.perf_counter()
            for group, rate in zip(optimizer.param_groups, base_rates, strict=True):
                group["lr"] = rate * recipe.schedule(step)
            value = loss(model, task.batch(step).to(device))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            train_loss = value.item()
            if not probe.measuring:
                seconds += time.perf_counter() - began
            if train_loss != train_loss or train_loss == float("inf"):
                raise FloatingPointError(
                    f"the training loss of {recipe.update} is {train_loss} at step {step}; lower its learning rate "
                    f"(AdamW {recipe.adamw_lr:g}, Muon {recipe.muon_lr:g})"
                )
            records.append({"step": step, "train_loss": train_loss, "seconds": seconds})
            records += probe.step()
            if on_step is not None:
                on_step(step + 1, train_loss)
            done = step + 1
            if done < recipe.steps:
                stop = should_stop is not None and should_stop()
                if stop or done % checkpoint_every == 0:
                    save(done)
                if stop:
                    raise Interrupted(done, checkpoint)
    final = sequence_losses(model, task.validation_windows(FINAL_WINDOWS))
    records.append({"step": recipe.steps} | _validation(final) | {"sequence_losses": final.tolist()})
    return records


def _validation(losses: torch.Tensor) -> dict[str, float]:
    stderr = losses.std() / len(losses) ** 0.5 if len(losses) > 1 else losses.new_tensor(float("nan"))
    return {"val_loss": losses.mean().item(), "val_stderr": stderr.item()}
