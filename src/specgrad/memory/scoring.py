"""Which items a weight recovers: exact pruned scoring, and the plain definition it equals."""

import math
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specgrad.memory.checks import Array
from specgrad.memory.gradient import checked_weight, gathered_rows
from specgrad.memory.task import CHUNK, Task

# Widths of the first competitor blocks: nearly every item loses to one of the first few dozen competitors, so the first
# blocks are narrow and the later ones, met by survivors alone, wide.
_FIRST_BLOCKS = (64, 256, 1024)
_BLOCK = 4096


@torch.no_grad()
def recovered(task: Task, weight: Array) -> Bool[Tensor, " N"]:
    """Mask of the items that the memory answers correctly: ``gamma_ii > max_{j != i} gamma_ij``, strictly.

    With shared answers: the item's answer beats every other output; items of the same answer do not compete.

    Every item duels blocks of competitors and leaves with its first defeat, so that nearly all leave after the first
    block; the mask is that of the full comparison. Ties lose, also those hidden by rounding: a margin below two roundings
    of the own score is none.

    Args:
        task: the task.
        weight: W, shape (d, d).

    Returns:
        Bool, shape (N,), the same on every process.

    Raises:
        ValueError: if the shape does not fit or an entry is not finite.

    Cost: ``2 N d^2 + 2 (count + few log N) N d`` FLOPs instead of ``2 N^2 d``; memory for a few thousand rows.

    Example:
        >>> task = Task(num_items=2000, dim=32, alpha=1.5)
        >>> recovered(task, torch.zeros(32, 32)).sum().item()
        0

    Source: Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554), section 3 (recovered items); the pruning is ours.
    """
    w = checked_weight(task, _scaled(weight))
    mask = torch.zeros(task.num_items, dtype=torch.bool, device=task.frequencies.device)
    if w is None:
        return mask
    alive = _Alive.none(task)
    begin, head = next(task.half("unembeddings", sum(_FIRST_BLOCKS)))
    bounds = [0, *(min(len(head), high) for high in accumulate(_FIRST_BLOCKS))]
    for start, u, v in task.chunks():
        queries = v @ w.T
        items = torch.arange(start, start + len(u), device=v.device)
        part = _Alive(items, task.outputs_of(items), queries, _own_scores(u, queries))
        for low, high in pairwise(bounds):
            part = part.duel(begin + low, head[low:high])
        alive = alive.joined(part)
    alive = _against_all(task, alive, begin + len(head))
    if task.split:
        alive = _against_other_processes(task, alive)
    mask[alive.items] = True
    return mask


@torch.no_grad()
def recovered_by_definition(task: Task, weight: Array, rows: int = 2048) -> Bool[Tensor, " N"]:
    """The reference for `recovered`: all N x N logits, a few rows at a time; one process, embeddings in memory.

    Cost: ``2 N^2 d`` FLOPs.
    """
    w = checked_weight(task, weight)
    mask = torch.zeros(task.num_items, dtype=torch.bool, device=task.frequencies.device)
    if w is None:
        return mask
    for start in range(0, task.num_items, rows):
        logits = task.embeddings[start : start + rows] @ w.T @ task.unembeddings.T
        index = torch.arange(len(logits), device=logits.device)
        outputs = task.outputs_of(start + index)
        own = logits[index, outputs].clone()
        logits[index, outputs] = -torch.inf
        mask[start : start + rows] = own > logits.amax(1)
    return mask


@torch.no_grad()
def margins(task: Task, weight: Array, items: Int[Tensor, " k"]) -> Float[Tensor, " k"]:
    """Margins ``gamma_ii - max_{j != i} gamma_ij`` of items in any order, float64; the same on every process.

    Raises:
        ValueError: if an item is not in [0, N), or the weight does not fit.

    Cost: ``2 k N d`` FLOPs.
    """
    w = checked_weight(task, weight)
    if w is None:
        return torch.zeros(len(items), dtype=torch.float64, device=items.device)
    if len(items) and not (int(items.min()) >= 0 and int(items.max()) < task.num_items):
        raise ValueError(
            f"`items` of `memory.margins` must be in [0, {task.num_items}); got {int(items.min())} to {int(items.max())}."
        )
    items, places = items.unique(return_inverse=True)
    u, v = gathered_rows(task, items)
    queries, outputs = v @ w.T, task.outputs_of(items)
    best = torch.full((len(items),), -torch.inf, dtype=task.dtype, device=w.device)
    for start, block in task.half("unembeddings", _BLOCK):
        logits = queries @ block.T
        column = outputs - start
        inside = ((column >= 0) & (column < len(block))).nonzero()[:, 0]
        logits[inside, column[inside]] = -torch.inf
        torch.maximum(best, logits.amax(1), out=best)
    if task.split:
        dist.all_reduce(best, dist.ReduceOp.MAX)
    return ((u * queries).sum(1).double() - best.double())[places]


class _Alive:
    """Items not yet beaten: their numbers, their answers', queries ``W v_i`` and the scores a competitor must reach."""

    def __init__(
        self,
        items: Int[Tensor, " k"],
        outputs: Int[Tensor, " k"],
        queries: Float[Tensor, "k d"],
        scores: Float[Tensor, " k"],
    ) -> None:
        self.items, self.outputs, self.queries, self.scores = items, outputs, queries, scores

    @classmethod
    def none(cls, task: Task) -> "_Alive":
        empty = torch.empty(0, task.dim, dtype=task.dtype, device=task.frequencies.device)
        nobody = torch.empty(0, dtype=torch.int64, device=empty.device)
        return cls(nobody, nobody, empty, empty[:, 0])

    def joined(self, other: "_Alive") -> "_Alive":
        return _Alive(*(torch.cat(pair) for pair in zip(self.parts, other.parts, strict=True)))

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.items, self.outputs, self.queries, self.scores

    def duel(self, first: int, competitors: Float[Tensor, "c d"]) -> "_Alive":
        """Those who beat all of the consecutive competitors from number ``first`` on, themselves left out."""
        if len(self.items) == 0 or len(competitors) == 0:
            return self
        best = self.queries.new_empty(len(self.items))
        for low in range(0, len(self.items), CHUNK):
            part = slice(low, low + CHUNK)
            logits = self.queries[part] @ competitors.T
            own = self.outputs[part] - first
            inside = ((own >= 0) & (own < len(competitors))).nonzero()[:, 0]
            logits[inside, own[inside]] = -torch.inf
            best[part] = logits.amax(1)
        keep = best < self.scores
        return _Alive(*(part[keep] for part in self.parts))


def _scaled(weight: Array) -> Tensor:
    """The weight over the power of two below its largest entry: no comparison changes, and none under- or overflows."""
    w = torch.as_tensor(weight).double()
    largest = float(w.abs().max())
    return w / 2.0 ** math.frexp(largest)[1] if 0 < largest < math.inf else w


def _own_scores(u: Float[Tensor, "k d"], queries: Float[Tensor, "k d"]) -> Float[Tensor, " k"]:
    """``gamma_ii`` less what rounding can have added, so that exact ties lose."""
    products = u * queries
    return products.sum(1) - 2 * torch.finfo(u.dtype).eps * products.abs().sum(1)


def _against_all(task: Task, alive: _Alive, begin: int) -> _Alive:
    """Survivors of the first blocks against this process's competitors from ``begin`` on."""
    for start, block in task.half("unembeddings", _BLOCK):
        skipped = max(0, begin - start)
        alive = alive.duel(start + skipped, block[skipped:])
    return alive


def _against_other_processes(task: Task, alive: _Alive) -> _Alive:
    """Survivors of every process meet the competitors of every other one."""
    rank, world = task.rank_and_world
    survivors = _Alive.none(task)
    for owner in range(world):
        count = torch.tensor([len(alive.items)], device=alive.items.device)
        dist.broadcast(count, owner)
        parts = [part.contiguous() if owner == rank else part.new_empty(int(count), *part.shape[1:]) for part in alive.parts]
        for part in parts:
            dist.broadcast(part, owner)
        survivors = survivors.joined(_Alive(*parts))
    mine = _against_all(task, survivors, task.outputs.start)
    votes = torch.zeros(task.num_items, dtype=torch.int32, device=alive.items.device)
    votes[mine.items] = 1
    dist.all_reduce(votes)
    agreed = votes[survivors.items] == world
    return _Alive(*(part[agreed] for part in survivors.parts))
