"""What is compared: capacity metrics of a mask, distinct items, and how far a direction is from the polar factor."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from specgrad.memory.checks import Array
from specgrad.memory.gradient import checked_frequencies, uncentred_gradient
from specgrad.memory.scoring import recovered
from specgrad.memory.task import Task


def capacity(task: Task, weight: Array, shares: Sequence[float | int] = (0.9,)) -> dict[str, float | int]:
    """How much a weight stores.

    Args:
        task: the task.
        weight: W, shape (d, d).
        shares: for each share x, ``top<100 x>`` is the largest i such that at least a share x of the first i items is
            recovered.

    Returns:
        ``count`` (recovered items), ``prefix`` (length of the longest fully recovered prefix), ``top90`` and
        ``accuracy`` (frequency-weighted share of recovered items).

    Cost: that of `recovered`.

    Example:
        >>> task = Task(num_items=5000, dim=32, alpha=1.5)
        >>> from specgrad.memory import one_step
        >>> capacity(task, one_step(task, "muon"))["count"] > capacity(task, one_step(task, "gd"))["count"]
        True
    """
    return capacity_of(recovered(task, weight), task.frequencies, shares)


def capacity_of(
    mask: Bool[Tensor, " N"], frequencies: Float[Tensor, " N"], shares: Sequence[float | int] = (0.9,)
) -> dict[str, float | int]:
    """The metrics of `capacity` from a mask.

    Raises:
        ValueError: if a share is not in (0, 1].

    Example:
        >>> mask = torch.tensor([True, True, False, True, False])
        >>> capacity_of(mask, torch.full((5,), 0.2), shares=(0.75,))
        {'count': 3, 'prefix': 2, 'top75': 4, 'accuracy': 0.6000000238418579}
    """
    for share in shares:
        if not 0 < share <= 1:
            raise ValueError(f"`shares` of `memory.capacity` must be in (0, 1]; got {share}.")
    hits = mask.long().cumsum(0)
    lengths = torch.arange(1, len(mask) + 1, device=mask.device)
    metrics: dict[str, float | int] = {"count": int(hits[-1]), "prefix": int((hits == lengths).sum())}
    for share in shares:
        # One part in 10^9 keeps shares such as 9 of 10 from being lost to rounding.
        enough = (hits >= share * lengths * (1 - 1e-9)).nonzero()
        metrics[f"top{100 * share:g}"] = int(enough[-1]) + 1 if len(enough) else 0
    return metrics | {"accuracy": float(frequencies[mask].sum())}


def distinct(frequencies: Float[Tensor, " N"]) -> int:
    """Number of distinct items in a batch."""
    return int(torch.count_nonzero(frequencies))


@torch.no_grad()
def polar_shortfall(gradient: Float[Tensor, "m n"], direction: Float[Tensor, "m n"]) -> float:
    """Share of the gradient's singular directions on which a polar method is off by more than one half.

    With ``G = A S B^T``, the share of k with ``|a_k^T D b_k - 1| > 1/2``, over the numerical range of G. Five quintic steps
    fall short on the bulk of a power-law gradient, and lose capacity for it; the exact polar factor gives 0.

    Example:
        >>> G = torch.diag(torch.tensor([1.0, 1e-6]))
        >>> polar_shortfall(G, torch.diag(torch.tensor([1.0, 1e-3])))
        0.5
    """
    a, s, bh = torch.linalg.svd(gradient.double(), full_matrices=False)
    kept = s > 1e-12 * s[0]
    gains = ((a.T @ direction.double()) * bh).sum(1)[kept]
    return float(((gains - 1).abs() > 0.5).double().mean()) if len(gains) else 0.0


@torch.no_grad()
def leave_one_out_spectrum(task: Task, item: int, frequencies: Array | None = None) -> Float[Tensor, " d"]:
    """Singular values, decreasing, of the start gradient without one item, ``sum_{j != i} q_j u_j v_j^T``.

    Source: Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554), Lemma 5.3.
    """
    if not 0 <= item < task.num_items:
        raise ValueError(f"`item` of `memory.leave_one_out_spectrum` must be in [0, {task.num_items}); got {item}.")
    q = checked_frequencies(task, frequencies).clone()
    q[item] = 0
    values: Tensor = torch.linalg.svdvals(uncentred_gradient(task, q))
    return values
