"""The loss, its gradient and its Hessian's product with a matrix, exactly: closed form at W = 0, fused passes elsewhere."""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from specgrad.memory.checks import Array
from specgrad.memory.softmax import Softmax, softmax_averages
from specgrad.memory.task import CHUNK, Task

# Queries of one pass: their accumulators stay small, and processes that split the items exchange few messages.
_QUERIES = 4096


@torch.no_grad()
def gradient(task: Task, weight: Array | None = None, frequencies: Array | None = None) -> Float[Tensor, "d d"]:
    """Minus the gradient of the loss, ``G = sum_i q_i (u_i - sum_j P_ij u_j) v_i^T``.

    Args:
        task: the task.
        weight: the matrix W, shape (d, d); None or zeros is the start, where G has a closed form.
        frequencies: q, shape (N,); None is the population p. Items with ``q_i = 0`` cost nothing.

    Returns:
        Float64, shape (d, d), the same on every process. Logits and softmax are computed in the task's dtype, sums over
        items in float64. For large N see `specgrad.memory.estimate_gradient`.

    Raises:
        ValueError: if a shape does not fit or an entry is not finite, or q is negative.

    Cost: at W = 0 ``2 D d^2`` FLOPs for D items with ``q_i > 0``, elsewhere ``4 D N d``; memory for a few thousand rows.

    Example:
        >>> task = Task(num_items=100, dim=4, alpha=1.5)
        >>> G = gradient(task)
        >>> W = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)
        >>> logits = task.embeddings @ W.T @ task.unembeddings.T
        >>> loss = -(task.frequencies * logits.log_softmax(1).diagonal()).sum()
        >>> torch.allclose(G, -torch.autograd.grad(loss, W)[0], rtol=0, atol=1e-14)
        True

    Source: Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554), equation 2.
    """
    return gradient_and_loss(task, weight, frequencies)[0]


@torch.no_grad()
def loss(task: Task, weight: Array | None = None, frequencies: Array | None = None) -> float:
    """The loss ``sum_i q_i (logsumexp_j gamma_ij - gamma_ii)``, exactly; arguments and cost as of `gradient`.

    Example:
        >>> round(loss(Task(num_items=100, dim=4, alpha=1.5)), 4)  # log 100
        4.6052
    """
    return gradient_and_loss(task, weight, frequencies)[1]


@torch.no_grad()
def gradient_and_loss(
    task: Task, weight: Array | None = None, frequencies: Array | None = None
) -> tuple[Float[Tensor, "d d"], float]:
    """`gradient` and `loss` from one pass."""
    q = checked_frequencies(task, frequencies)
    w = checked_weight(task, weight)
    if w is None:
        # A task keeps its population gradient at the start: GD, Muon and Newton all begin there.
        if q is not task.frequencies:
            start = _at_zero(task, q)
        else:
            if "_start" not in task.__dict__:
                task.__dict__["_start"] = _at_zero(task, q)
            start = task.__dict__["_start"].clone()
        return start, float(q.sum()) * math.log(task.num_outputs)
    sums = torch.zeros(task.dim + 1, task.dim, dtype=torch.float64, device=q.device)
    for queries, averages, mine in _passes(task, w, None, q):
        if mine is None:
            continue
        items, u, v = mine
        own = (u * queries).sum(1)
        weights = q[items]
        sums[:-1] += ((u - averages.mean).double() * weights[:, None]).T @ v.double()
        sums[-1, 0] += (weights * (averages.log_sum - own)).sum()
    task.total(sums)
    return sums[:-1], float(sums[-1, 0])


@torch.no_grad()
def hessian_product(
    task: Task, direction: Array, weight: Array | None = None, frequencies: Array | None = None
) -> Float[Tensor, "d d"]:
    """The Hessian of the loss applied to a matrix, ``H[D] = sum_i q_i Cov_{P_i}(u) D v_i v_i^T``.

    ``Cov_{P_i}(u)`` is the covariance of the unembeddings under the softmax of row i; at W = 0 this is
    ``Sigma_u D M_v`` of `start_hessian`.

    Args:
        task: the task.
        direction: the matrix D, shape (d, d).
        weight: where the Hessian is taken; None is W = 0.
        frequencies: q, shape (N,); None is the population.

    Returns:
        Float64, shape (d, d).

    Cost: twice the exact gradient.

    Source: second derivative of the loss in section 3 of Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554).
    """
    q = checked_frequencies(task, frequencies)
    w = checked_weight(task, weight)
    along = _checked_matrix(task, "direction", direction)
    if w is None:
        sigma_u, m_v = start_hessian(task, q)
        return sigma_u @ along.double() @ m_v
    total = torch.zeros(task.dim, task.dim, dtype=torch.float64, device=q.device)
    for _, averages, mine in _passes(task, w, along, q):
        if mine is None:
            continue
        items, _, v = mine
        assert averages.tilt is not None
        assert averages.tilted_mean is not None
        covariance = averages.tilted_mean - averages.tilt[:, None] * averages.mean
        total += (covariance.double() * q[items][:, None]).T @ v.double()
    task.total(total)
    return total


@torch.no_grad()
def start_hessian(task: Task, frequencies: Array | None = None) -> tuple[Float[Tensor, "d d"], Float[Tensor, "d d"]]:
    """The two factors of the Hessian at W = 0, ``H[D] = Sigma_u D M_v``.

    ``Sigma_u = (1/N) sum_i u_i u_i^T - ubar ubar^T`` and ``M_v = sum_i q_i v_i v_i^T``, both float64.

    Source: Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554), equation 7.
    """
    q = checked_frequencies(task, frequencies)
    m_v = torch.zeros(task.dim, task.dim, dtype=torch.float64, device=q.device)
    for items, _, v in weighted_rows(task, q, unembeddings=False):
        wide = v.double()
        m_v += (q[items][:, None] * wide).T @ wide
    task.total(m_v)
    return moments(task)[1], m_v


@torch.no_grad()
def uncentred_gradient(task: Task, frequencies: Array | None = None) -> Float[Tensor, "d d"]:
    """``sum_i q_i u_i v_i^T``, float64: the start gradient without its mean, as the theory analyses it."""
    q = checked_frequencies(task, frequencies)
    total = torch.zeros(task.dim, task.dim, dtype=torch.float64, device=q.device)
    for items, u, v in weighted_rows(task, q):
        total += (q[items][:, None] * u).T @ v.double()
    task.total(total)
    return total


def moments(task: Task) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
    """Mean and covariance (divided by N) of all unembeddings, float64; computed once per task."""
    if "_moments" not in task.__dict__:
        sums = torch.zeros(task.dim + 1, task.dim, dtype=torch.float64, device=task.frequencies.device)
        for _, u in task.half("unembeddings"):
            wide = u.double()
            sums[:-1] += wide.T @ wide
            sums[-1] += wide.sum(0)
        task.total(sums)
        sums /= task.num_outputs
        mean = sums[-1]
        task.__dict__["_moments"] = (mean, sums[:-1] - torch.outer(mean, mean))
    kept: tuple[Tensor, Tensor] = task.__dict__["_moments"]
    return kept


def mean_unembedding(task: Task) -> Float[Tensor, " d"]:
    """Mean of all unembeddings, float64; computed once per task."""
    if "_moments" in task.__dict__:
        return moments(task)[0]
    if "_mean" not in task.__dict__:
        total = torch.zeros(task.dim, dtype=torch.float64, device=task.frequencies.device)
        for _, u in task.half("unembeddings"):
            total += u.sum(0, dtype=torch.float64)
        task.total(total)
        task.__dict__["_mean"] = total / task.num_outputs
    kept: Tensor = task.__dict__["_mean"]
    return kept


def weighted_rows(
    task: Task, q: Float[Tensor, " N"], size: int = CHUNK, *, unembeddings: bool = True
) -> Iterator[tuple[Int[Tensor, " k"], Float[Tensor, "k d"], Float[Tensor, "k d"]]]:
    """Items of this process with ``q_i > 0``, a few at a time, with their rows of U and V."""
    mine = q[task.rows.start : task.rows.stop].nonzero()[:, 0] + task.rows.start
    if 2 * len(mine) > len(task.rows):
        for start, u, v in task.chunks(size):
            items = torch.arange(start, start + len(u), device=q.device)
            yield items, u, v
        return
    for items in mine.split(size):
        u = task.pick("unembeddings", items) if unembeddings else items.new_empty(0, 0, dtype=task.dtype)
        yield items, u, task.pick("embeddings", items)


def gathered_rows(task: Task, items: Int[Tensor, " k"]) -> tuple[Float[Tensor, "k d"], Float[Tensor, "k d"]]:
    """Rows of U and V of increasing items, on every process."""
    mine = items[(items >= task.rows.start) & (items < task.rows.stop)]
    place = torch.searchsorted(items, mine)
    rows = torch.zeros(2, len(items), task.dim, dtype=task.dtype, device=items.device)
    rows[0, place], rows[1, place] = task.pick("unembeddings", mine), task.pick("embeddings", mine)
    task.total(rows)
    return rows[0], rows[1]


def checked_frequencies(task: Task, frequencies: Array | None) -> Float[Tensor, " N"]:
    """Frequencies q as float64 on the task's device; the population if None."""
    if frequencies is None:
        return task.frequencies
    q = torch.as_tensor(frequencies).to(task.frequencies)
    if q.shape != (task.num_items,):
        raise ValueError(f"`frequencies` must have shape ({task.num_items},); got {tuple(q.shape)}.")
    if not (q.isfinite().all() and (q >= 0).all()):
        raise ValueError("`frequencies` must be finite and >= 0; got NaN, infinite or negative entries.")
    return q


def checked_weight(task: Task, weight: Array | None) -> Float[Tensor, "d d"] | None:
    """W in the task's dtype; None if it is None or zero."""
    if weight is None:
        return None
    w = _checked_matrix(task, "weight", weight)
    return w if w.any() else None


def _checked_matrix(task: Task, name: str, matrix: Array) -> Float[Tensor, "d d"]:
    w = torch.as_tensor(matrix)
    if w.shape != (task.dim, task.dim):
        raise ValueError(f"`{name}` must have shape ({task.dim}, {task.dim}); got {tuple(w.shape)}.")
    w = w.detach().to(task.frequencies.device, task.dtype)
    if not w.isfinite().all():
        raise ValueError(f"`{name}` must be finite; got NaN or infinite entries.")
    return w


def _at_zero(task: Task, q: Float[Tensor, " N"]) -> Float[Tensor, "d d"]:
    """``sum_i q_i (u_i - ubar) v_i^T``: the softmax is uniform."""
    sums = torch.zeros(task.dim + 1, task.dim, dtype=torch.float64, device=q.device)
    for items, u, v in weighted_rows(task, q):
        weights, wide = q[items], v.double()
        sums[:-1] += (weights[:, None] * u).T @ wide
        sums[-1] += weights @ wide
    task.total(sums)
    return sums[:-1] - torch.outer(mean_unembedding(task), sums[-1])


_Mine = tuple[Int[Tensor, " k"], Float[Tensor, "k d"], Float[Tensor, "k d"]]


def _passes(
    task: Task, weight: Float[Tensor, "d d"], along: Float[Tensor, "d d"] | None, q: Float[Tensor, " N"]
) -> Iterator[tuple[Float[Tensor, "k d"], Softmax, _Mine | None]]:
    """Softmax averages of all items with ``q_i > 0``, in groups; None for the items of another process.

    Every process sweeps its own competitors for the items of every process in turn.
    """
    rank, world = task.rank_and_world
    own = weighted_rows(task, q, _QUERIES)
    for owner in range(world):
        left = int(torch.count_nonzero(q[task.rows_of(owner).start : task.rows_of(owner).stop]))
        whole = 2 * left > len(task.rows_of(owner))
        left = len(task.rows_of(owner)) if whole else left
        while left > 0:
            mine = next(own) if owner == rank else None
            count = torch.tensor([len(mine[0]) if mine is not None else 0], device=q.device)
            if world > 1:
                dist.broadcast(count, owner)
            size = int(count)
            stacked = torch.empty(2, size, task.dim, dtype=task.dtype, device=q.device)
            if mine is not None:
                stacked[0] = mine[2] @ weight.T
                stacked[1] = mine[2] @ along.T if along is not None else 0
            if world > 1:
                dist.broadcast(stacked, owner)
            yield stacked[0], softmax_averages(task, stacked[0], stacked[1] if along is not None else None), mine
            left -= size
