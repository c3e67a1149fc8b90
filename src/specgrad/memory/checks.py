"""What the lab refuses, and arrays as tensors."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Array = Tensor | np.ndarray


def check_integer(owner: str, name: str, value: object) -> None:
    """Refuses what is no integer, such as 1e5, before it fails somewhere deep."""
    if not isinstance(value, Integral):
        raise ValueError(f"`{name}` of `{owner}` must be an integer; got {value!r}.")


def as_tensor(array: Array | Sequence[Any]) -> Tensor:
    """A tensor without gradients; numpy arrays with negative strides are copied."""
    return torch.as_tensor(np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array).detach()


def checked_counts(function: str, name: str, values: Array | Sequence[float | int]) -> Float[Tensor, " N"]:
    """Numbers divided by their sum, float64."""
    if isinstance(values, Mapping):
        raise ValueError(f"`{name}` of `memory.Task.{function}` must be numbers; got a mapping, pass list(its .values()).")
    try:
        counts = as_tensor(values).to(torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"`{name}` of `memory.Task.{function}` must be numbers; got others ({error}).") from error
    if counts.ndim != 1 or len(counts) < 2:
        raise ValueError(
            f"`{name}` of `memory.Task.{function}` must be at least two numbers; got shape {tuple(counts.shape)}."
        )
    if not (counts.isfinite().all() and (counts >= 0).all() and counts.sum() > 0):
        raise ValueError(f"`{name}` of `memory.Task.{function}` must be finite, >= 0 and not all 0; got others.")
    total = counts.sum()
    # Frequencies that sum to 1 up to rounding are kept bit for bit; numpy's multinomial allows for 1e-12.
    return counts if abs(total.item() - 1) < 5e-13 else counts / total


def free_bytes(device: torch.device) -> int | None:
    """Memory that can be taken, None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    return min([free, *_free_in_groups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def _free_in_groups(root: Path, membership: Path) -> list[int]:
    """What the limits of a container or a cluster's job leave (control groups, version 2); file caches count as free."""
    left = []
    try:
        group = next(line[3:] for line in membership.read_text().splitlines() if line.startswith("0::"))
        folder = root / group.strip("/")
        for place in (folder, *folder.parents):
            limit = place / "memory.max"
            if limit.is_file() and (most := limit.read_text().strip()) != "max":
                used = int((place / "memory.current").read_text())
                stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
                left.append(max(0, int(most) - used + int(stat.get("inactive_file", 0))))
            if place == root:
                break
    except (OSError, StopIteration, ValueError):
        pass
    return left
