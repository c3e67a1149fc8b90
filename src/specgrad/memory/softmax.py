"""Softmax averages over all competitors in one fused pass over column blocks: never an N x N matrix.

A block of logits is formed, exponentiated and multiplied by the unembeddings while it is in the cache; running maxima
keep the exponentials finite whatever the weight. Processes that split the items combine their partial sums.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from specgrad.memory.task import Task

# Tile of logits: small enough for the second-level cache, large enough that products run at full rate.
_TILE_ROWS, _TILE_COLUMNS = 256, 2048


@dataclass
class Softmax:
    """Averages over ``P_ij = softmax_j(a_i . u_j)`` for queries a_i.

    Attributes:
        log_sum: ``log sum_j exp(a_i . u_j)``.
        mean: ``sum_j P_ij u_j``.
        tilt: ``sum_j P_ij (b_i . u_j)`` for second queries b_i; None without.
        tilted_mean: ``sum_j P_ij (b_i . u_j) u_j``; None without.
    """

    log_sum: Float[Tensor, " k"]
    mean: Float[Tensor, "k d"]
    tilt: Float[Tensor, " k"] | None = None
    tilted_mean: Float[Tensor, "k d"] | None = None


def softmax_averages(task: Task, queries: Float[Tensor, "k d"], tilts: Float[Tensor, "k d"] | None = None) -> Softmax:
    """One pass over all unembeddings, the same queries on every process.

    Args:
        task: whose unembeddings are the competitors.
        queries: rows ``W v_i``.
        tilts: rows ``D v_i`` of a second matrix, for Hessian products.

    Cost: ``4 k N d`` FLOPs (8 with tilts) in the dtype of the task; memory for a few rows per query.
    """
    k, d = queries.shape
    top = queries.new_full((k,), -torch.inf)
    sums = queries.new_zeros(k, 2)
    mean = queries.new_zeros(k, d)
    tilted = queries.new_zeros(k, d) if tilts is not None else None
    tile = queries.new_empty(_TILE_ROWS * _TILE_COLUMNS)
    second = torch.empty_like(tile) if tilts is not None else None
    for _, block in task.half("unembeddings", 4 * _TILE_COLUMNS):
        for columns in block.split(_TILE_COLUMNS):
            for low in range(0, k, _TILE_ROWS):
                part = slice(low, min(k, low + _TILE_ROWS))
                size = (part.stop - low, len(columns))
                logits = torch.mm(queries[part], columns.T, out=tile[: size[0] * size[1]].view(size))
                highest = torch.maximum(top[part], logits.amax(1))
                logits.sub_(highest[:, None]).exp_()
                fade = (top[part] - highest).exp_()
                top[part] = highest
                sums[part] *= fade[:, None]
                sums[part, 0] += logits.sum(1)
                mean[part] = torch.addmm(mean[part].mul_(fade[:, None]), logits, columns)
                if tilts is not None and tilted is not None and second is not None:
                    weights = torch.mm(tilts[part], columns.T, out=second[: size[0] * size[1]].view(size)).mul_(logits)
                    sums[part, 1] += weights.sum(1)
                    tilted[part] = torch.addmm(tilted[part].mul_(fade[:, None]), weights, columns)
    if task.split:
        everywhere = top.clone()
        dist.all_reduce(everywhere, dist.ReduceOp.MAX)
        fade = (top - everywhere).exp_()[:, None]
        top = everywhere
        for part_sum in (sums, mean, tilted):
            if part_sum is not None:
                dist.all_reduce(part_sum.mul_(fade))
    total = sums[:, :1]
    mean /= total
    if tilted is None:
        return Softmax(top + total[:, 0].log(), mean)
    return Softmax(top + total[:, 0].log(), mean, sums[:, 1] / total[:, 0], tilted / total)


def log_sums_along(
    task: Task, queries: Float[Tensor, "k d"], steps: Float[Tensor, "k d"], rates: Float[Tensor, " r"]
) -> Float[Tensor, "r k"]:
    """``log sum_j exp((a_i + rate s_i) . u_j)`` for many rates in one pass; arguments the same on every process.

    Cost: ``4 k N d + 6 r k N`` FLOPs.
    """
    k = len(queries)
    top = queries.new_full((len(rates), k), -torch.inf)
    sums = queries.new_zeros(len(rates), k)
    factors = rates.to(queries)
    for _, block in task.half("unembeddings", 4 * _TILE_COLUMNS):
        for columns in block.split(_TILE_COLUMNS):
            for low in range(0, k, _TILE_ROWS):
                part = slice(low, min(k, low + _TILE_ROWS))
                start, slope = queries[part] @ columns.T, steps[part] @ columns.T
                for r, factor in enumerate(factors):
                    logits = torch.addcmul(start, slope, factor)
                    highest = torch.maximum(top[r, part], logits.amax(1))
                    sums[r, part] *= (top[r, part] - highest).exp_()
                    sums[r, part] += logits.sub_(highest[:, None]).exp_().sum(1)
                    top[r, part] = highest
    if task.split:
        everywhere = top.clone()
        dist.all_reduce(everywhere, dist.ReduceOp.MAX)
        sums *= (top - everywhere).exp_()
        top = everywhere
        dist.all_reduce(sums)
    return top + sums.log()
