"""The state of an unfinished simulation on disk, so that an interrupted one continues where it was."""

import hashlib
import pickle
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from specgrad.memory.task import Task
from specgrad.runs.files import atomic, set_aside

# Saving takes at most this share of the time: all weights are written each time, and cheap steps can be many.
_SHARE = 0.05


@dataclass
class Progress:
    """What has been done and what the next step needs.

    Attributes:
        records: one per finished step.
        weights: W after each finished step.
        buffer: momentum.
        parameter: the parameter that a built optimizer moves, in its own dtype; None without one.
        optimizer: the state of a built optimizer; None without one.
    """

    records: list[dict[str, Any]]
    weights: list[Float[Tensor, "d d"]]
    buffer: Float[Tensor, "d d"]
    parameter: Float[Tensor, "d d"] | None = None
    optimizer: dict[str, Any] | None = None


class Checkpoint:
    """A file that holds the progress of one run; of several processes, the first reads and writes it."""

    def __init__(self, task: Task, path: Path, settings: dict[str, Any]) -> None:
        """Names the run by its task and settings; ``path`` is where its progress lives."""
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"`checkpoint` of `memory.simulate` must be a file in an existing folder; got {str(path)!r}.")
        self.task, self.path = task, path
        self.writes = task.rank_and_world[0] == 0
        # Only the process that writes needs the name, and naming reads arrays.
        self.name = {key: repr(value) for key, value in (_task_name(task) | settings).items()} if self.writes else {}
        self.saved_steps, self.saved_at, self.took = 0, 0.0, 0.0

    def load(self) -> Progress | None:
        """The progress on disk, None if there is none; a damaged file is set aside with a warning.

        Raises:
            ValueError: if the file belongs to another run.
        """
        found: list[Any] = [self._read() if self.writes else None]
        if self.task.split:
            dist.broadcast_object_list(found)
        if isinstance(found[0], str):
            raise ValueError(found[0])
        if found[0] is None:
            return None
        state = {key: value for key, value in found[0].items() if key != "run"}
        progress = Progress(**state)
        self.saved_steps = len(progress.records)
        return progress

    def save(self, progress: Progress, *, now: bool = False) -> None:
        """Writes the progress if saving was rare enough so far, or ``now``."""
        began = time.perf_counter()
        due = now or began - self.saved_at >= self.took / _SHARE
        if not (self.writes and due and len(progress.records) != self.saved_steps):
            return
        with atomic(self.path) as temporary:
            torch.save(vars(progress) | {"run": self.name}, temporary)
        self.saved_steps, self.saved_at = len(progress.records), time.perf_counter()
        self.took = self.saved_at - began

    def _read(self) -> dict[str, Any] | str | None:
        """The stored state, what is wrong with it, or None."""
        if not self.path.exists():
            return None
        try:
            state = torch.load(self.path, map_location=self.task.device, weights_only=True)
            other = {key: (state["run"].get(key), value) for key, value in self.name.items()}
            missing = {"records", "weights", "buffer", "parameter", "optimizer"} - state.keys()
            if missing:
                raise KeyError(", ".join(sorted(missing)))
        except (OSError, RuntimeError, KeyError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
            set_aside(self.path, ValueError(str(error).splitlines()[0] if str(error) else type(error).__name__))
            return None
        differences = [f"{key} {was}, now {now}" for key, (was, now) in other.items() if was != now]
        if differences:
            return (
                f"`checkpoint` of `memory.simulate` must hold this run or not exist; {str(self.path)!r} holds one with "
                f"{'; '.join(differences)}."
            )
        return dict(state)


def _task_name(task: Task) -> dict[str, Any]:
    """What determines the items, however they are stored or divided."""
    digest = hashlib.sha256()
    for array in (*task.given, task.answers):
        if array is not None:
            digest.update(array.cpu().contiguous().numpy().data)
    fields = ("num_items", "dim", "alpha", "seed", "kappa_u", "kappa_v", "unit_norm", "dtype")
    return {name: getattr(task, name) for name in fields} | {"arrays": digest.hexdigest()[:16]}
