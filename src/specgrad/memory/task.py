"""What is learned: N facts ``i -> i`` with power-law frequencies, stored in one d x d matrix; facts may share answers."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from specgrad.memory.checks import Array, as_tensor, check_integer, checked_counts, free_bytes
from specgrad.memory.embeddings import ROWS_PER_STREAM, Kind, gaussian_rows, power_law_scale

Storage = Literal["memory", "stream"]

# Rows that are worked on together: a few tens of MB of work space at dim 256.
CHUNK = 8192

# Work space beside the embeddings, in chunks of rows: what the widest pass (mean field) holds at once.
_WORK_CHUNKS = 12


class Rows(NamedTuple):
    """A chunk of items: number of the first, their rows of U (those of their answers) and V."""

    start: int
    unembeddings: Float[Tensor, "rows d"]
    embeddings: Float[Tensor, "rows d"]


@dataclass(frozen=True, eq=False)
class Task:
    """Linear associative memory: N items, embeddings ``v_i``, unembeddings ``u_i``, frequencies ``p_i``.

    A weight W gives input i the logits ``gamma_ij = u_j^T W v_i``; the loss is
    ``L(W) = sum_i p_i (logsumexp_j gamma_ij - gamma_ii)``. By default ``u_i, v_i ~ N(0, I/d)`` and ``p_i ~ i^-alpha``.

    Real facts share answers: with ``answers`` a_i there are M outputs ``u_1 .. u_M``, the logits of input i are
    ``gamma_ij = u_j^T W v_i`` for j up to M, and ``gamma_ii`` stands for ``gamma_{i a_i}`` everywhere: item i is recovered
    if its answer beats every *other output*; items with the same answer do not compete. The theory is for distinct answers.

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
        given: the arrays that `from_arrays` and `from_counts` pass on.
        answers: number of the output that answers each item, shape (N,); None is the item's own number. The unembeddings
            of shared answers, M rows, are held whole by every process.

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
    answers: Int[Tensor, " N"] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("num_items", "dim", "seed"):
            check_integer("memory.Task", name, getattr(self, name))
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
        if self.answers is not None:
            self._check_answers()
        if min(self.num_items, self.num_outputs) < self.rank_and_world[1]:
            raise ValueError(
                f"`num_items` of a split `memory.Task`, and its outputs, must be at least the number of processes, "
                f"{self.rank_and_world[1]}; got {self.num_items} and {self.num_outputs}."
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
        answers: Array | Sequence[int] | None = None,
        alpha: float | int | None = None,
        seed: int = 0,
        split: bool = False,
    ) -> "Task":
        """A task from arrays U, V of shape (N, d) and frequencies p of shape (N,), which are divided by their sum.

        Args:
            unembeddings: rows u_i, float32 or float64; shape (M, d) with ``answers``. Arrays are not copied: do not change
                them afterwards.
            embeddings: rows v_i, of the same dtype.
            frequencies: nonnegative numbers, not all zero.
            answers: for each item the row of ``unembeddings`` that answers it, shape (N,); None if row i answers item i.
            alpha: exponent that theory and defaults of regularisation should use, if there is one.
            seed: seed of batches.
            split: as of the class; each process passes the full arrays and keeps its rows.

        Raises:
            ValueError: if shapes do not fit, or an array holds NaN, infinities or negative frequencies.
        """
        u, v = (as_tensor(array) for array in (unembeddings, embeddings))
        for name, array in (("unembeddings", u), ("embeddings", v)):
            if array.ndim != 2 or array.shape[1:] != u.shape[1:] or (answers is None and len(array) != len(u)):
                wanted = "(N, d), the same for both" if answers is None else "(M, d) and (N, d), of the same d"
                raise ValueError(
                    f"`{name}` of `memory.Task.from_arrays` must have shape {wanted}; got {tuple(u.shape)} and "
                    f"{tuple(v.shape)}."
                )
            if array.dtype not in (torch.float32, torch.float64) or array.dtype != u.dtype:
                raise ValueError(
                    f"`{name}` of `memory.Task.from_arrays` must be float32 or float64, the same for both; got "
                    f"{u.dtype} and {v.dtype}."
                )
            if not array.isfinite().all():
                raise ValueError(f"`{name}` of `memory.Task.from_arrays` must be finite; got NaN or infinite entries.")
        p = checked_counts("from_arrays", "frequencies", frequencies)
        if len(p) != len(v):
            raise ValueError(
                f"`frequencies` of `memory.Task.from_arrays` must have shape ({len(v)},); got {tuple(p.shape)}."
            )
        given = (u, v.to(u.device), p.to(u.device))
        outputs = None if answers is None else as_tensor(answers).to(u.device)
        return cls(
            len(v), u.shape[1], alpha, seed, split=split, dtype=u.dtype, device=u.device, given=given, answers=outputs
        )

    @classmethod
    def from_counts(
        cls,
        counts: Array | Sequence[float | int],
        dim: int,
        seed: int = 0,
        *,
        answers: Array | Sequence[Hashable] | None = None,
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
            counts: how often each fact was seen, for example word counts of `specgrad.data.word_counts` or the counts of
                `specgrad.data.cities`.
            dim: dimension of the embeddings.
            seed: seed of embeddings and batches.
            answers: the answer of each fact, names or numbers, in the order of ``counts``, for example the objects of
                `specgrad.data.cities`; equal ones are one output. None if every fact has its own.
            alpha: exponent of a fit to the counts, for theory and defaults of regularisation.
            kappa_u: see the class, as for the rest.
            kappa_v: see the class.
            unit_norm: see the class.
            storage: see the class.
            split: see the class.
            dtype: see the class.
            device: see the class.

        Raises:
            ValueError: if a count is negative or not finite, there are fewer than two counts or fewer than two different
                answers, or not one answer for each count.

        Example:
            >>> Task.from_counts(np.array([1, 3, 1]), dim=4).frequencies.tolist()
            [0.6, 0.2, 0.2]
            >>> Task.from_counts([1, 4, 3], dim=4, answers=["Chile", "Peru", "Chile"]).answers.tolist()
            [0, 1, 1]
        """
        p, order = checked_counts("from_counts", "counts", counts).to(device).sort(descending=True, stable=True)
        outputs = None
        if answers is not None:
            names = answers.tolist() if isinstance(answers, Tensor | np.ndarray) else list(answers)
            if len(names) != len(p):
                raise ValueError(
                    f"`answers` of `memory.Task.from_counts` must be one for each of {len(p)} counts; got {len(names)}."
                )
            ranked = [names[i] for i in order.tolist()]
            # Outputs are numbered by their most frequent item.
            number = {name: k for k, name in enumerate(dict.fromkeys(ranked))}
            outputs = torch.tensor([number[name] for name in ranked], device=device)
        return cls(
            len(p),
            dim,
            alpha,
            seed,
            kappa_u,
            kappa_v,
            unit_norm,
            storage,
            split,
            dtype,
            device,
            (None, None, p),
            outputs,
        )

    @cached_property
    def frequencies(self) -> Float[Tensor, " N"]:
        """Frequencies p, float64, of all items on every process."""
        if self.given[2] is not None:
            return self.given[2]
        assert self.alpha is not None
        weights = np.arange(1, self.num_items + 1, dtype=np.float64) ** -self.alpha
        return torch.from_numpy(weights / weights.sum()).to(self.device)

    @cached_property
    def unembeddings(self) -> Float[Tensor, "outputs d"]:
        """Rows u_j of this process (all of them unless split, or if answers are shared)."""
        whole = range(self.num_outputs) if self.answers is not None else self.rows
        return self._whole("unembeddings", self.given[0], whole)

    @cached_property
    def embeddings(self) -> Float[Tensor, "rows d"]:
        """Rows v_i of this process (all of them unless split)."""
        return self._whole("embeddings", self.given[1], self.rows)

    @cached_property
    def num_outputs(self) -> int:
        """Number M of outputs that compete: N unless answers are shared."""
        if self.answers is None:
            return self.num_items
        return len(self.given[0]) if self.given[0] is not None else int(self.answers.max()) + 1

    def outputs_of(self, items: Int[Tensor, " k"]) -> Int[Tensor, " k"]:
        """Numbers of the outputs that answer items."""
        return items if self.answers is None else self.answers[items]

    def sample(self, batch_size: int, step: int = 0) -> Float[Tensor, " N"]:
        """Frequencies of a minibatch, ``Multinomial(B, p) / B``, drawn with replacement and afresh for each step.

        Raises:
            ValueError: if ``batch_size`` is below 1 or ``step`` below 0.
        """
        check_integer("memory.Task.sample", "batch_size", batch_size)
        check_integer("memory.Task.sample", "step", step)
        if step < 0:
            raise ValueError(f"`step` of `memory.Task.sample` must be >= 0; got {step}.")
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
        return _share(self.num_items, rank, self.rank_and_world[1])

    @property
    def rows(self) -> range:
        """Items of this process."""
        return self.rows_of(self.rank_and_world[0])

    @property
    def outputs(self) -> range:
        """Outputs of this process; its items unless answers are shared."""
        return _share(self.num_outputs, *self.rank_and_world)

    def chunks(self, size: int = CHUNK) -> Iterator[Rows]:
        """This process's items, at most ``size`` at a time."""
        if self.answers is not None:
            for start, v in self.half("embeddings", size):
                yield Rows(start, self.unembeddings[self.answers[start : start + len(v)]], v)
            return
        for (start, u), (_, v) in zip(self.half("unembeddings", size), self.half("embeddings", size), strict=True):
            yield Rows(start, u, v)

    def half(self, kind: Kind, size: int = CHUNK) -> Iterator[tuple[int, Float[Tensor, "rows d"]]]:
        """This process's rows of U (its outputs) or V (its items) alone, as pairs of the first one's number and the rows."""
        if kind == "unembeddings" and self.answers is not None:
            for start in range(self.outputs.start, self.outputs.stop, size):
                yield start, self.unembeddings[start : min(start + size, self.outputs.stop)]
            return
        if self.storage == "stream":
            yield from self._drawn(kind, self.rows, size)
            return
        matrix = self.unembeddings if kind == "unembeddings" else self.embeddings
        for start in range(0, len(matrix), size):
            yield self.rows.start + start, matrix[start : start + size]

    def pick(self, kind: Kind, items: Int[Tensor, " k"]) -> Float[Tensor, "k d"]:
        """Rows of V, or of the answers in U, for the given items, all of which must be this process's."""
        if kind == "unembeddings" and self.answers is not None:
            return self.unembeddings[self.answers[items]]
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

    def _whole(self, kind: Kind, given: Tensor | None, rows: range) -> Float[Tensor, "rows d"]:
        if given is not None:
            return given[rows.start : rows.stop]
        matrix = torch.empty(len(rows), self.dim, dtype=self.dtype, device=self.device)
        for start, drawn in self._drawn(kind, rows, CHUNK):
            matrix[start - rows.start : start - rows.start + len(drawn)] = drawn
        return matrix

    def _check_answers(self) -> None:
        answers = self.answers
        assert answers is not None
        if answers.shape != (self.num_items,) or answers.dtype != torch.int64:
            raise ValueError(
                f"`answers` of `memory.Task` must be int64 of shape ({self.num_items},); got {answers.dtype} of shape "
                f"{tuple(answers.shape)}."
            )
        low, high = int(answers.min()), int(answers.max())
        if low < 0 or high >= self.num_outputs:
            raise ValueError(
                f"`answers` of `memory.Task` must be numbers of outputs, 0 to {self.num_outputs - 1}; got {low} to {high}."
            )
        if self.num_outputs < 2:
            raise ValueError("`answers` of `memory.Task` must hold at least two different answers; got one.")

    def _check_memory(self) -> None:
        """Refuses what cannot fit before anything is drawn."""
        free = free_bytes(torch.device(self.device))
        rows = len(self.rows) if self.storage == "memory" else 0
        held = (rows + (rows if self.answers is None else self.num_outputs)) * self.dim
        needed = (held + _WORK_CHUNKS * CHUNK * self.dim) * torch.finfo(self.dtype).bits // 8 + 32 * self.num_items
        if free is not None and needed > free:
            raise MemoryError(
                f"`memory.Task` with num_items={self.num_items}, dim={self.dim} needs about {needed / 2**30:.1f} GiB, of "
                f"which {free / 2**30:.1f} GiB are free. Use storage='stream', dtype=torch.float32 or more processes."
            )


def _share(number: int, rank: int, world: int) -> range:
    return range(number * rank // world, number * (rank + 1) // world)
