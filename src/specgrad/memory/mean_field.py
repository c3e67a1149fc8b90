"""Softmax gradients at a cost linear in N: a Gaussian average over the tail, exact rows where its error is largest.

For row i the logits of the other N - 1 items are replaced by a Gaussian with their measured mean and variance, so that
``log sum_{j != i} e^gamma_ij`` becomes ``b_i = log(N-1) + m.w_i + w_i^T C w_i / 2`` with ``w_i = W v_i``. What is neglected
is the sampling fluctuation of the sum, of relative size ``eps_i^2 = (e^v_i - 1 - v_i) / N`` with ``v_i = w_i^T C w_i``; the
exponential of a Gaussian has variance ``e^(2v) (e^v - 1)`` relative to its mean squared, and the measured moments remove
the linear part ``v``. It is of order one once ``sqrt(v_i)`` reaches ``sqrt(log N)``. The error of a row enters the
gradient as ``e_i = q_i P_tail eps_i``, and few rows carry most of it: they are done exactly. A weight of few dominant items,
as gradient descent has, makes the logits of those items far from Gaussian in every row: they can be summed exactly as
columns, and the Gaussian average taken over the others.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import softplus

from specgrad.memory.checks import Array, check_integer
from specgrad.memory.embeddings import power_law_scale
from specgrad.memory.gradient import (
    checked_frequencies,
    checked_weight,
    gathered_rows,
    gradient_and_loss,
    moments,
    weighted_rows,
)
from specgrad.memory.softmax import log_sums_along, softmax_averages
from specgrad.memory.task import Task

Method = Literal["exact", "hybrid", "mean-field"]
Moments = Literal["sample", "gauss"]

# Rows done exactly per dimension: measured to bring the count within 1 % of the exact dynamics (N = 1e4 to 5e4).
_ROWS_PER_DIM = 4

# Above these the estimates were seen to be off by more than a factor of 2 (ratio), or counts by several per cent (polar).
_LARGEST_RATIO, _LARGEST_POLAR = 0.8, 0.1


class MeanFieldWarning(UserWarning):
    """The approximation is used where its own estimate says that it is not to be trusted."""


@dataclass(frozen=True)
class Estimate:
    """A gradient and how far it may be off.

    Attributes:
        gradient: minus the loss gradient, float64.
        loss: the loss, from exact rows where there are any and mean-field rows elsewhere.
        relative_error: estimated Frobenius error of the gradient relative to its norm; 0 if exact.
        polar_error: estimated Frobenius error of the polar factor, divided by ``sqrt(d)``.
        sigma_ratio: largest standard deviation of a row's logits among mean-field rows, over ``sqrt(log N)``.
        exact_rows: number of rows done exactly.
        exact_columns: number of competitors whose logits are exact in every row.
    """

    gradient: Float[Tensor, "d d"]
    loss: float
    relative_error: float
    polar_error: float
    sigma_ratio: float
    exact_rows: int
    exact_columns: int = 0


@torch.no_grad()
def estimate_gradient(
    task: Task,
    weight: Array | None = None,
    frequencies: Array | None = None,
    method: Method = "hybrid",
    *,
    rows: int | None = None,
    columns: int = 0,
    tolerance: float | int | None = None,
    moments_from: Moments = "sample",
) -> Estimate:
    """Minus the loss gradient at a cost linear in N, with its error estimate.

    Args:
        task: the task.
        weight: W, shape (d, d); None is the start, where every method is exact in closed form.
        frequencies: q, shape (N,); None is the population. Items with ``q_i = 0`` cost nothing.
        method: ``exact`` is `specgrad.memory.gradient`; ``mean-field`` averages every row's tail; ``hybrid`` does the rows
            with the largest estimated errors exactly.
        rows: exact rows of the hybrid; None is ``4 d``, or more if ``tolerance`` asks for it.
        columns: outputs, those of the highest frequencies, whose logits are exact in the approximate rows; d for gradient
            descent, 0 for Muon, which gains nothing from them.
        tolerance: bound on ``polar_error``, > 0, to be reached by adding exact rows.
        moments_from: ``sample`` measures mean and covariance of the unembeddings, leaving the own item out; ``gauss`` takes
            0 and the covariance of the task's law.

    Returns:
        The estimate. Calibrated on Muon with isotropic Gaussian embeddings: over 30 cases the error was 0.6 to 1.6 times
        ``relative_error``. For gradient descent, whose weight is a few rank-one terms, it was up to 60 times larger without
        exact columns, and up to 3.5 times with d of them (24 steps of three tasks).

    Warns:
        MeanFieldWarning: if ``sigma_ratio`` exceeds 0.8 or ``polar_error`` 0.1.

    Cost: ``8 N d^2 + 4 R N d`` FLOPs for R exact rows and ``4 K N d`` for K exact columns; memory for a few thousand rows.

    Example:
        >>> task = Task(num_items=2000, dim=16, alpha=1.5)
        >>> W = gradient_and_loss(task)[0]
        >>> got = estimate_gradient(task, 4 * W, rows=64)
        >>> error = torch.linalg.norm(got.gradient - gradient_and_loss(task, 4 * W)[0]) / torch.linalg.norm(got.gradient)
        >>> error.item() < 1e-3
        True

    Source: ours; it extends Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554), section 3.
    """
    if method not in get_args(Method):
        raise ValueError(
            f"`method` of `memory.estimate_gradient` must be one of {', '.join(get_args(Method))}; got {method!r}."
        )
    if rows is not None:
        check_integer("memory.estimate_gradient", "rows", rows)
    check_integer("memory.estimate_gradient", "columns", columns)
    if not 0 <= columns <= task.num_outputs - 2:
        raise ValueError(
            f"`columns` of `memory.estimate_gradient` must be >= 0 and leave two of {task.num_outputs} outputs; "
            f"got {columns}."
        )
    if rows is not None and rows < 0:
        raise ValueError(f"`rows` of `memory.estimate_gradient` must be >= 0; got {rows}.")
    if moments_from not in get_args(Moments):
        raise ValueError(f"`moments_from` of `memory.estimate_gradient` must be sample or gauss; got {moments_from!r}.")
    if moments_from == "gauss" and task.given[0] is not None:
        raise ValueError("`moments_from`='gauss' of `memory.estimate_gradient` needs Gaussian unembeddings; got arrays.")
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"`tolerance` of `memory.estimate_gradient` must be > 0; got {tolerance}.")
    q = checked_frequencies(task, frequencies)
    w = checked_weight(task, weight)
    seen = int(torch.count_nonzero(q))
    wanted = (_ROWS_PER_DIM * task.dim if rows is None else rows) if method == "hybrid" else 0
    if method == "exact" or w is None or (method == "hybrid" and wanted >= seen):
        exact, value = gradient_and_loss(task, w, q)
        return Estimate(exact, value, 0.0, 0.0, 0.0, seen)
    rivals = _rivals(task, columns, moments_from)
    sums, errors, sigmas, losses = _mean_field(task, w, q, rivals)
    direction = sums.clone()
    half = float(torch.linalg.svdvals(direction)[task.dim // 2])
    if method == "hybrid" and tolerance is not None:
        wanted = max(wanted, _rows_needed(errors, tolerance * math.sqrt(task.dim) * half))
    value = float(losses.sum())
    if wanted > 0:
        chosen = errors.topk(min(wanted, seen)).indices.sort().values
        correction, exact_losses = _exact_rows(task, w, q, chosen, rivals)
        direction += correction
        value += exact_losses - float(losses[chosen].sum())
        errors[chosen] = 0
        sigmas[chosen] = 0
        half = float(torch.linalg.svdvals(direction)[task.dim // 2])
    error = float(errors.norm())
    estimate = Estimate(
        direction,
        value,
        error / max(float(direction.norm()), 1e-300),
        error / max(math.sqrt(task.dim) * half, 1e-300),
        float(sigmas.max()) / math.sqrt(math.log(task.num_outputs)),
        min(wanted, seen),
        columns,
    )
    if estimate.sigma_ratio > _LARGEST_RATIO or estimate.polar_error > _LARGEST_POLAR:
        warnings.warn(
            f"The {method} gradient is not to be trusted here: logits spread {estimate.sigma_ratio:.2f} sqrt(log N) "
            f"(trusted up to {_LARGEST_RATIO}), estimated error of the polar factor {estimate.polar_error:.2f} (up to "
            f"{_LARGEST_POLAR}). Raise `rows`, or take smaller steps.",
            MeanFieldWarning,
            stacklevel=3,
        )
    return estimate


class _Rivals(NamedTuple):
    """The competitors of every row: some outputs exactly, the others by mean and covariance.

    Attributes:
        outputs: increasing numbers of the exact ones.
        unembeddings: their rows.
        others: how many others there are.
        mean: mean of the others.
        covariance: covariance of the others.
        sampled: whether mean and covariance are those of the actual others, so that a row can leave its own out.
    """

    outputs: Int[Tensor, " c"]
    unembeddings: Float[Tensor, "c d"]
    others: int
    mean: Float[Tensor, " d"]
    covariance: Float[Tensor, "d d"]
    sampled: bool


def _rivals(task: Task, columns: int = 0, moments_from: Moments = "sample") -> _Rivals:
    """The outputs of the highest frequencies exactly, and the moments of the others."""
    p, n = task.frequencies, task.num_outputs
    if task.answers is not None:
        p = torch.zeros(n, dtype=p.dtype, device=p.device).index_add_(0, task.answers, p)
    outputs = p.topk(columns).indices.sort().values
    chosen = task.unembeddings[outputs] if task.answers is not None else gathered_rows(task, outputs)[0]
    if moments_from == "gauss":
        variances = torch.from_numpy(power_law_scale(task.dim, task.kappa_u)).to(chosen).square()
        return _Rivals(outputs, chosen, n - columns, torch.zeros_like(variances), variances.diag(), False)
    mean, covariance = moments(task)
    if columns:
        # Sums over all outputs less those over the exact ones.
        wide = chosen.double()
        second = n * (covariance + torch.outer(mean, mean)) - wide.T @ wide
        mean = (n * mean - wide.sum(0)) / (n - columns)
        covariance = second / (n - columns) - torch.outer(mean, mean)
    return _Rivals(outputs, chosen, n - columns, mean.to(chosen), covariance.to(chosen), True)


class _Tail(NamedTuple):
    """What a chunk of rows competes with: ``log_sum`` and ``mean`` of exact and averaged competitors together."""

    own: Float[Tensor, " k"]
    log_sum: Float[Tensor, " k"]
    mean: Float[Tensor, "k d"]
    variance: Float[Tensor, " k"]
    averaged: Float[Tensor, " k"]


def _tail(rivals: _Rivals, outputs: Int[Tensor, " k"], u: Float[Tensor, "k d"], queries: Float[Tensor, "k d"]) -> _Tail:
    """``gamma_ii``, ``b_i``, ``m_i + C_i w_i``, ``v_i`` and the averaged share of ``e^b_i``, the own output left out."""
    n, mean = rivals.others, rivals.mean
    own = (u * queries).sum(1)
    along, spread = queries @ mean, queries @ rivals.covariance
    variance = (spread * queries).sum(1)
    exact = outputs[:, None] == rivals.outputs
    # Leaving one row out of a mean and a covariance is a rank-one change; none is due where the own output is exact.
    out = (~exact.any(1)).to(u)
    log_number = (n - out).log()
    if rivals.sampled:
        left = n - out
        pull = out * (own - along) * (n / left)
        variance = ((n * variance - pull * (own - along)) / left).clamp_(min=0)
        spread = (n * spread - pull[:, None] * (u - mean)) / left[:, None]
        average = (n * mean - out[:, None] * u) / left[:, None]
        log_sum = log_number + (n * along - out * own) / left + variance / 2
    else:
        average = mean
        log_sum = log_number + variance / 2
    tail_mean = average + spread
    if not len(rivals.outputs):
        return _Tail(own, log_sum, tail_mean, variance, torch.ones_like(own))
    logits = (queries @ rivals.unembeddings.T).masked_fill_(exact, -torch.inf)
    top = torch.logaddexp(logits.logsumexp(1), log_sum)
    averaged = (log_sum - top).exp()
    both = (logits - top[:, None]).exp_() @ rivals.unembeddings + averaged[:, None] * tail_mean
    return _Tail(own, top, both, variance, averaged)


def _mean_field(
    task: Task, w: Float[Tensor, "d d"], q: Float[Tensor, " N"], rivals: _Rivals
) -> tuple[Float[Tensor, "d d"], Float[Tensor, " N"], Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Gradient, and for every item its estimated error, spread of logits and weighted loss."""
    total = torch.zeros(task.dim, task.dim, dtype=torch.float64, device=q.device)
    per_item = torch.zeros(3, task.num_items, dtype=torch.float64, device=q.device)
    for items, u, v in weighted_rows(task, q):
        weights = q[items]
        tail = _tail(rivals, task.outputs_of(items), u, v @ w.T)
        share = torch.sigmoid(tail.log_sum - tail.own)
        residual = (u - tail.mean) * (weights * share)[:, None].to(u.dtype)
        total += residual.double().T @ v.double()
        variance = tail.variance.double()
        fluctuation = torch.expm1(variance) - (variance if rivals.sampled else 0)
        per_item[0, items] = weights * share * tail.averaged * (fluctuation / rivals.others).clamp_(max=1).sqrt()
        per_item[1, items] = torch.where(weights > 0, variance, 0).sqrt()
        per_item[2, items] = weights * softplus(tail.log_sum - tail.own).double()
    task.total(total, per_item)
    return total, per_item[0], per_item[1], per_item[2]


def _exact_rows(
    task: Task, w: Float[Tensor, "d d"], q: Float[Tensor, " N"], chosen: Int[Tensor, " k"], rivals: _Rivals
) -> tuple[Float[Tensor, "d d"], float]:
    """What replacing the mean-field average of some rows by the softmax adds to the gradient, and their exact loss."""
    u, v = gathered_rows(task, chosen)
    queries = v @ w.T
    averages = softmax_averages(task, queries)
    tail = _tail(rivals, task.outputs_of(chosen), u, queries)
    share = torch.sigmoid(tail.log_sum - tail.own)[:, None]
    weights = q[chosen]
    change = (1 - share) * u + share * tail.mean - averages.mean
    correction = (change.double() * weights[:, None]).T @ v.double()
    return correction, float((weights * (averages.log_sum - tail.own)).sum())


def _rows_needed(errors: Float[Tensor, " N"], bound: float | int) -> int:
    """Rows to do exactly so that the norm of the others' errors is at most ``bound``."""
    remaining = errors.square().sort(descending=True).values.flip(0).cumsum(0).flip(0).sqrt()
    return int((remaining > bound).sum())


@torch.no_grad()
def losses_along(
    task: Task,
    weight: Float[Tensor, "d d"],
    direction: Float[Tensor, "d d"],
    rates: Float[Tensor, " r"],
    frequencies: Float[Tensor, " N"],
    items: Int[Tensor, " k"] | None = None,
) -> Float[Tensor, " r"]:
    """Loss of ``weight + rate * direction`` for many rates in one pass.

    Mean-field, ``sum_i q_i softplus(b_i - gamma_ii)``: logits are linear in the rate and their variance quadratic, so that
    a rate costs a few operations per item. Some items can be done exactly.

    Args:
        task: the task.
        weight: W.
        direction: D.
        rates: the rates.
        frequencies: q.
        items: increasing numbers of the items whose loss is exact; None for none.

    Cost: ``8 N d^2 + 10 r N`` FLOPs, and ``4 k N d + 6 r k N`` for k exact items.
    """
    w, step = weight.to(task.dtype), direction.to(task.dtype)
    total = torch.zeros_like(rates)
    for rows, u, v in weighted_rows(task, frequencies):
        own, log_tail = _along(task, u, v @ w.T, v @ step.T, rates)
        total += softplus(log_tail - own) @ frequencies[rows]
    task.total(total)
    if items is not None and len(items):
        u, v = gathered_rows(task, items)
        at, by = v @ w.T, v @ step.T
        own, log_tail = _along(task, u, at, by, rates)
        exact = log_sums_along(task, at, by, rates).double() - own
        total += (exact - softplus(log_tail - own)) @ frequencies[items]
    return total


@torch.no_grad()
def least_certain(
    task: Task, weight: Float[Tensor, "d d"], frequencies: Float[Tensor, " N"], rows: int
) -> Int[Tensor, " k"]:
    """The items, in increasing order, whose mean-field rows have the largest estimated errors."""
    errors = _mean_field(task, weight.to(task.dtype), frequencies, _rivals(task))[1]
    return errors.topk(min(rows, int(torch.count_nonzero(frequencies)))).indices.sort().values


def _along(
    task: Task, u: Float[Tensor, "k d"], at: Float[Tensor, "k d"], by: Float[Tensor, "k d"], rates: Float[Tensor, " r"]
) -> tuple[Float[Tensor, "r k"], Float[Tensor, "r k"]]:
    """``gamma_ii`` and ``b_i`` of rows with queries ``at + rate * by``, the own item left out as in `_tail`."""
    n = task.num_outputs
    mean, covariance = (moment.to(u) for moment in moments(task))
    own = torch.stack([(u * at).sum(1), (u * by).sum(1)]).double()
    along = torch.stack([at @ mean, by @ mean]).double()
    spread_at, spread_by = at @ covariance, by @ covariance
    a, b, c = ((x * y).sum(1).double() for x, y in ((at, spread_at), (by, spread_at), (by, spread_by)))
    factor = rates[:, None]
    own_r, along_r = (pair[0] + factor * pair[1] for pair in (own, along))
    variance = a + 2 * factor * b + factor.square() * c
    variance = ((n * variance - (own_r - along_r).square() * (n / (n - 1))) / (n - 1)).clamp_(min=0)
    # Beyond a spread of sqrt(2 log n) the sum is its largest term, as in the random energy model: v/2 would exaggerate it.
    log_n = math.log(n - 1)
    growth = torch.where(variance <= 2 * log_n, variance / 2, (2 * log_n * variance).sqrt() - log_n)
    return own_r, log_n + (n * along_r - own_r) / (n - 1) + growth
