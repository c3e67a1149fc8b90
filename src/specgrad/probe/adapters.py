"""The probe inside other people's training loops: Hugging Face's Trainer and Lightning."""

from importlib import import_module
from typing import Any

import torch

from specgrad.probe.probe import Probe


def _library(name: str, extra: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"this needs {name}; install it with: pip install 'specgrad[{extra}]'") from error


def _world() -> Any:
    """The group of all processes, where there are several."""
    distributed = torch.distributed
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    return distributed.group.WORLD if several else None


def trainer_callback(**settings: Any) -> Any:
    """A ``transformers.TrainerCallback`` that probes the model of a ``Trainer``; its ``probe`` exists once training begins.

    A specgrad optimizer enters the Trainer by ``optimizers=(Muon(param_groups(model), lr=0.02), None)``.

    Args:
        settings: of `specgrad.Probe`, such as ``every`` and ``on_record``.

    Returns:
        A callback; ``callback.probe.report()`` after training.

    Raises:
        ModuleNotFoundError: without transformers.
    """
    base = _library("transformers", "hf").TrainerCallback

    class ProbeCallback(base):  # type: ignore[misc, valid-type]
        """Ends the probe's step before each optimizer step, when all micro-batches are in."""

        probe: Probe | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.probe = Probe(model, **({"group": _world()} | settings)).attach()
            self.probe.resume_at(state.global_step)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.probe is not None:
                self.probe.step()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.probe is not None:
                self.probe.detach()

    return ProbeCallback()


def lightning_callback(**settings: Any) -> Any:
    """A Lightning callback that probes the module in training; its ``probe`` exists once training begins.

    Args:
        settings: of `specgrad.Probe`.

    Returns:
        A callback; ``callback.probe.report()`` after training.

    Raises:
        ModuleNotFoundError: without lightning.
    """
    base = _library("lightning", "lightning").Callback

    class ProbeCallback(base):  # type: ignore[misc, valid-type]
        """Ends the probe's step before each optimizer step, when all micro-batches are in."""

        probe: Probe | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.probe = Probe(pl_module, **({"group": _world()} | settings)).attach()
            self.probe.resume_at(trainer.global_step)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if self.probe is not None:
                self.probe.step()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            if self.probe is not None:
                self.probe.detach()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            if self.probe is not None:
                self.probe.detach()

    return ProbeCallback()
