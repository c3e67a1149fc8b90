"""What is learned: N facts ``i -> i`` with power-law frequencies, stored in one d x d matrix."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from specgrad.memory.embeddings import ROWS_PER_STREAM, Kind, gaussian_rows, power_law_scale

Storage = Literal["memory", "stream"]
Array = Tensor | np.ndarray

# Rows that are worked on together: a few tens of MB of work space at dim 256.
CHUNK = 8192

# Work space beside the embeddings, in chunks of rows: what the widest pass (mean field) holds at once.
_WORK_CHUNKS = 12


class Rows(NamedTuple):
    """A chunk of items: number of the first, their rows of U and V."""

    start: int
    unembeddings: Float[Tensor, "rows d"]
    embeddings: Float[Tensor, "rows d"]


@dataclass(frozen=True, eq=False)
class Task:
    """Linear associative memory: N items, embeddings ``v_i``, unembeddings ``u_i``, frequencies ``p_i``.

    A weight W gives input i the logits ``gamma_ij = u_j^T W v_i``; the loss is
    ``L(W) = sum_i p_i (logsumexp_j gamma_ij - gamma_ii)``. By default ``u_i, v_i ~ N(0, I/d)`` and ``p_i ~ i^-alpha``.

    Attributes:
        num_items: number N of facts, at least 2.
        dim: dimension d of the embeddings.
        alpha: exponent of the frequencies, > 1; None where they were measured (`from_counts`) or given (`from_arrays`).
        seed: seed of embeddings and batches.
        kappa_u: covariance eigenvalues of the u_i are proportional to ``i^-kappa_u``, with trace 1.
        kappa_v: the same for the v_i.
        unit_norm: whether embeddings are divided by their lengths.
        storage: ``memory`` keeps U and V; ``stream`` draws their rows again in each pass, in bounded memory.
        split: whether the items are divided among the processes of ``torch.distributed``, which must be initialised; every
            process then calls the same functions and gets the same results.
        dtype: float32 or float64 of embeddings and logits; gradients are summed in float64 in either case.
        device: device of the embeddings.

    Example:
        >>> task = Task(num_items=1000, dim=32, alpha=1.5, seed=0)
        >>> [round(p, 4) for p in task.frequencies[:3].tolist()]
        [0.3923, 0.1387, 0.0755]

    Source: Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554), section 3.
    """

    num_items: int
    dim: int
    alpha: float | int | None
    seed: int = 0
    kappa_u: float | int = 0.0
    kappa_v: float | int = 0.0
    unit_norm: bool = False
    storage: Storage = "memory"
    split: bool = False
    dtype: torch.dtype = torch.float64
    device: torch.device | str = "cpu"
    given: tuple[Tensor | None, Tensor | None, Tensor | None] = field(default=(None, None, None), repr=False)

    def __post_init__(self) -> None:
        if self.num_items < 2:
            raise ValueError(f"`num_items` of `memory.Task` must be >= 2; got {self.num_items}.")
        if self.dim < 1:
            raise ValueError(f"`dim` of `memory.Task` must be >= 1; got {self.dim}.")
        if self.alpha is None and self.given[2] is None:
            raise ValueError("`alpha` of `memory.Task` must be a number > 1; got None. Use Task.from_counts or from_arrays.")
        if self.alpha is not None and not 1 < self.alpha < float("inf"):
            raise ValueError(f"`alpha` of `memory.Task` must be > 1 so that frequencies are summable; got {self.alpha}.")
        if self.seed < 0:
            raise ValueError(f"`seed` of `memory.Task` must be >= 0; got {self.seed}.")
        for name in ("kappa_u", "kappa_v"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"`{name}` of `memory.Task` must be finite and >= 0; got {getattr(self, name)}.")
        if self.storage not in ("memory", "stream"):
            raise ValueError(f"`storage` of `memory.Task` must be memory or stream; got {self.storage!r}.")
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"`dtype` of `memory.Task` must be torch.float32 or torch.float64; got {self.dtype}.")
        if self.split and not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "`split` of `memory.Task` needs an initialised torch.distributed; call init_process_group first."
            )
        if self.num_items < self.rank_and_world[1]:
            raise ValueError(
                f"`num_items` of a split `memory.Task` must be at least the number of processes, {self.rank_and_world[1]}; "
                f"got {self.num_items}."
            )
        if self.given[0] is None:
            self._check_memory()

    @classmethod
    def from_arrays(
        cls,
        unembeddings: Array,
        embeddings: Array,
        frequencies: Array,
        *,
        alpha: float | int | None = None,
        seed: int = 0,
        split: bool = False,
    ) -> "Task":
        """A task from arrays U, V of shape (N, d) and frequencies p of shape (N,), which are divided by their sum.

        Args:
            unembeddings: rows u_i, float32 or float64.
            embeddings: rows v_i, of the same dtype.
            frequencies: nonnegative numbers, not all zero.
            alpha: exponent that theory and defaults of regularisation should use, if there is one.
            seed: seed of batches.
            split: as of the class; each process passes the full arrays and keeps its rows.

        Raises:
            ValueError: if shapes do not fit, or an array holds NaN, infinities or negative frequencies.
        """
        u, v = (torch.as_tensor(array) for array in (unembeddings, embeddings))
        for name, array in (("unembeddings", u), ("embeddings", v)):
            if array.ndim != 2 or array.shape != u.shape:
                raise ValueError(
                    f"`{name}` of `memory.Task.from_arrays` must have shape (N, d), the same for both; got "
                    f"{tuple(u.shape)} and {tuple(v.shape)}."
                )
            if array.dtype not in (torch.float32, torch.float64) or array.dtype != u.dtype:
                raise ValueError(
                    f"`{name}` of `memory.Task.from_arrays` must be float32 or float64, the same for both; got "
                    f"{u.dtype} and {v.dtype}."
                )
            if not array.isfinite().all():
                raise ValueError(f"`{name}` of `memory.Task.from_arrays` must be finite; got NaN or infinite entries.")
        p = _checked_counts("from_arrays", "frequencies", frequencies)
        if len(p) != len(u):
            raise ValueError(
                f"`frequencies` of `memory.Task.from_arrays` must have shape ({len(u)},); got {tuple(p.shape)}."
            )
        return cls(
            len(u), u.shape[1], alpha, seed, split=split, dtype=u.dtype, device=u.device, given=(u, v, p.to(u.device))
        )

    @classmethod
    def from_counts(
        cls,
        counts: Array | Sequence[float | int],
        dim: int,
        seed: int = 0,
        *,
        alpha: float | int | None = None,
        kappa_u: float | int = 0.0,
        kappa_v: float | int = 0.0,
        unit_norm: bool = False,
        storage: Storage = "memory",
        split: bool = False,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> "Task":
        """A task with measured frequencies and Gaussian embeddings; items are put in order of decreasing count.

        Args:
            counts: how often each fact was seen, for example those of `specgrad.data.word_counts` or
                `specgrad.data.cities`. Every item has an answer of its own here, also where real facts share them.
            dim: dimension of the embeddings.
            seed: seed of embeddings and batches.
            alpha: exponent of a fit to the counts, for theory and defaults of regularisation.
            kappa_u: see the class, as for the rest.
            kappa_v: see the class.
            unit_norm: see the class.
            storage: see the class.
            split: see the class.
            dtype: see the class.
            device: see the class.

        Raises:
            ValueError: if a count is negative or not finite, or there are fewer than two.

        Example:
            >>> Task.from_counts(np.array([1, 3, 1]), dim=4).frequencies.tolist()
            [0.6, 0.2, 0.2]
        """
        p = _checked_counts("from_counts", "counts", counts).sort(descending=True, stable=True).values
        return cls(
            len(p), dim, alpha, seed, kappa_u, kappa_v, unit_norm, storage, split, dtype, device,
            given=(None, None, p.to(device)),
        )  # fmt: skip

    @cached_property
    def frequencies(self) -> Float[Tensor, " N"]:
        """Frequencies p, float64, of all items on every process."""
        if self.given[2] is not None:
            return self.given[2]
        assert self.alpha is not None
        weights = np.arange(1, self.num_items + 1, dtype=np.float64) ** -self.alpha
        return torch.from_numpy(weights / weights.sum()).to(self.device)

    @cached_property
    def unembeddings(self) -> Float[Tensor, "rows d"]:
        """Rows u_i of this process (all of them unless split)."""
        return self._whole("unembeddings", self.given[0])

    @cached_property
    def embeddings(self) -> Float[Tensor, "rows d"]:
        """Rows v_i of this process (all of them unless split)."""
        return self._whole("embeddings", self.given[1])

    def sample(self, batch_size: int, step: int = 0) -> Float[Tensor, " N"]:
        """Frequencies of a minibatch, ``Multinomial(B, p) / B``, drawn with replacement and afresh for each step.

        Raises:
            ValueError: if ``batch_size`` is below 1.
        """
        if batch_size < 1:
            raise ValueError(f"`batch_size` of `memory.Task.sample` must be >= 1; got {batch_size}.")
        counts = np.random.default_rng([self.seed, 2, step]).multinomial(batch_size, self.frequencies.cpu().numpy())
        return torch.from_numpy(counts / batch_size).to(self.device)

    @property
    def rank_and_world(self) -> tuple[int, int]:
        """Number of this process and of all."""
        return (dist.get_rank(), dist.get_world_size()) if self.split else (0, 1)

    def rows_of(self, rank: int) -> range:
        """Items of a process: consecutive, as equal as can be."""
        world = self.rank_and_world[1]
        return range(self.num_items * rank // world, self.num_items * (rank + 1) // world)

    @property
    def rows(self) -> range:
        """Items of this process."""
        return self.rows_of(self.rank_and_world[0])

    def chunks(self, size: int = CHUNK) -> Iterator[Rows]:
        """This process's items, at most ``size`` at a time."""
        for (start, u), (_, v) in zip(self.half("unembeddings", size), self.half("embeddings", size), strict=True):
            yield Rows(start, u, v)

    def half(self, kind: Kind, size: int = CHUNK) -> Iterator[tuple[int, Float[Tensor, "rows d"]]]:
        """Rows of U or V alone, as pairs of the first row's number and the rows."""
        if self.storage == "stream":
            yield from self._drawn(kind, self.rows, size)
            return
        matrix = self.unembeddings if kind == "unembeddings" else self.embeddings
        for start in range(0, len(matrix), size):
            yield self.rows.start + start, matrix[start : start + size]

    def pick(self, kind: Kind, items: Int[Tensor, " k"]) -> Float[Tensor, "k d"]:
        """Rows of the given items, increasing, all of which must be this process's."""
        if self.storage == "memory":
            matrix = self.unembeddings if kind == "unembeddings" else self.embeddings
            return matrix[items - self.rows.start]
        picked = torch.empty(len(items), self.dim, dtype=self.dtype, device=self.device)
        for block in torch.unique(items // ROWS_PER_STREAM).tolist():
            whole = range(block * ROWS_PER_STREAM, min((block + 1) * ROWS_PER_STREAM, self.num_items))
            for start, rows in self._drawn(kind, whole, CHUNK):
                inside = (items >= start) & (items < start + len(rows))
                picked[inside] = rows[items[inside] - start]
        return picked

    def total(self, *parts: Tensor) -> None:
        """Adds up tensors over all processes, in place."""
        if self.split:
            for part in parts:
                dist.all_reduce(part)

    def _drawn(self, kind: Kind, rows: range, size: int) -> Iterator[tuple[int, Float[Tensor, "rows d"]]]:
        scale = power_law_scale(self.dim, self.kappa_u if kind == "unembeddings" else self.kappa_v)
        for start, drawn in gaussian_rows(kind, self.seed, rows.start, rows.stop, scale, self.unit_norm, size):
            yield start, drawn.to(self.device, self.dtype)

    def _whole(self, kind: Kind, given: Tensor | None) -> Float[Tensor, "rows d"]:
        if given is not None:
            return given[self.rows.start : self.rows.stop]
        matrix = torch.empty(len(self.rows), self.dim, dtype=self.dtype, device=self.device)
        for start, rows in self._drawn(kind, self.rows, CHUNK):
            matrix[start - self.rows.start : start - self.rows.start + len(rows)] = rows
        return matrix

    def _check_memory(self) -> None:
        """Refuses what cannot fit before anything is drawn."""
        free = _free_bytes(torch.device(self.device))
        held = 2 * len(self.rows) * self.dim if self.storage == "memory" else 0
        needed = (held + _WORK_CHUNKS * CHUNK * self.dim) * torch.finfo(self.dtype).bits // 8 + 32 * self.num_items
        if free is not None and needed > free:
            raise MemoryError(
                f"`memory.Task` with num_items={self.num_items}, dim={self.dim} needs about {needed / 2**30:.1f} GiB, of "
                f"which {free / 2**30:.1f} GiB are free. Use storage='stream', dtype=torch.float32 or more processes."
            )


def _checked_counts(function: str, name: str, values: Array | Sequence[float | int]) -> Float[Tensor, " N"]:
    """Numbers divided by their sum, float64."""
    counts = torch.as_tensor(values).to(torch.float64)
    if counts.ndim != 1 or len(counts) < 2:
        raise ValueError(
            f"`{name}` of `memory.Task.{function}` must be at least two numbers; got shape {tuple(counts.shape)}."
        )
    if not (counts.isfinite().all() and (counts >= 0).all() and counts.sum() > 0):
        raise ValueError(f"`{name}` of `memory.Task.{function}` must be finite, >= 0 and not all 0; got others.")
    total = counts.sum()
    # Frequencies that sum to 1 up to rounding are kept bit for bit.
    return counts if abs(total.item() - 1) < 1e-12 * len(counts) else counts / total


def _free_bytes(device: torch.device) -> int | None:
    """Memory that can be taken, None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123 - no file of the user's
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
