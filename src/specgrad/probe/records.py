"""From what a step gathered to one record per block."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from specgrad.probe.condition import condition
from specgrad.probe.gathering import Gathered
from specgrad.probe.gradients import NO_RANKS, gain_ranks, matrix_ranks, shardwise_nuclear_rank, squared_singular_values
from specgrad.probe.inputs import InputStatistics, TokenCounts
from specgrad.probe.layers import Block, Layer

NO_INPUTS = {
    "stable_rank": math.nan, "stable_rank_error": math.nan, "stable_rank_side": "", "noise_to_signal": math.nan,
    "outlier_share": math.nan, "stable_rank_rest": math.nan,
}  # fmt: skip

# Below this many tokens an expert's ranks say how few they are and nothing else.
LEAST_TOKENS = 8


def records_of(layers: list[Layer], gathered: Gathered, step: int, shards: int | None) -> Iterator[dict[str, Any]]:
    """One record per block of every layer, in the order of the model."""
    known: dict[tuple[int, ...], dict[str, Any]] = {}

    def input_ranks(layer: Layer, block: Block) -> tuple[int, dict[str, Any]]:
        statistics: InputStatistics | TokenCounts | None = gathered.counts.get(layer.name)
        if statistics is None:
            streamed = gathered.inputs.get((layer.name, block.stream))
            if streamed is None:
                return -1, NO_INPUTS
            statistics = streamed.restricted(block.columns) if block.columns is not None else streamed
            key = tuple(statistics.parts)
            if key not in known:
                known[key] = statistics.ranks()
            return statistics.tokens, known[key]
        return statistics.tokens, statistics.ranks()

    by_name = {layer.name: layer for layer in layers}
    for layer in layers:
        grad = gathered.grads.get(layer.parameter)
        grad = grad.to_dense() if grad is not None and grad.is_sparse else grad
        for block in layer.blocks:
            tokens, inputs = input_ranks(layer, block)
            core = by_name.get(layer.core)
            core_rank = math.nan
            if core is not None:
                core_rank = float(input_ranks(core, core.blocks[-1])[1]["stable_rank"])
            yield _record(layer, block, grad, tokens, inputs, core_rank, step, shards)


def _record(
    layer: Layer, block: Block, grad: Tensor | None, tokens: int, inputs: dict[str, Any], core_rank: float, step: int,
    shards: int | None,
) -> dict[str, Any]:  # fmt: skip
    shape = layer.matrix(layer.weight.detach().to("meta"), block).shape
    ranks, sharded = dict(NO_RANKS), math.nan
    if grad is not None:
        matrix = layer.matrix(grad, block)
        if layer.kind == "gain":
            ranks = gain_ranks(matrix)
        else:
            ranks = matrix_ranks(squared_singular_values(matrix))
            if shards is not None and math.isfinite(ranks["nuclear_rank"]):
                sharded = shardwise_nuclear_rank(matrix, shards)
    stable, nuclear = float(inputs["stable_rank"]), ranks.pop("nuclear_rank")
    reason = layer.undefined or _why_undefined(layer, tokens, grad, stable, nuclear)
    outcome = condition(math.nan if reason else nuclear, stable)
    record = {
        "step": step, "layer": layer.block_name(block), "kind": layer.kind, "rows": shape[0],
        "cols": shape[1] if len(shape) > 1 else 1, "tokens": max(tokens, 0), "stable_rank": stable,
        "nuclear_rank": nuclear, "ratio": outcome.ratio, "verdict": outcome.verdict, "reason": reason,
    }  # fmt: skip
    record |= {key: inputs[key] for key in NO_INPUTS if key != "stable_rank"}
    record |= {"core_stable_rank": core_rank, "core_ratio": math.nan if reason else nuclear / core_rank}
    record |= ranks
    record["frequency_exponent"] = inputs.get("frequency_exponent", math.nan)
    if shards is not None:
        record["shardwise_nuclear_rank"] = sharded
    return record | {"parameter": layer.parameter}


def _why_undefined(layer: Layer, tokens: int, grad: Tensor | None, stable: float, nuclear: float) -> str:
    if tokens < 0:
        if isinstance(layer.module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            return "its forward hook never fires: MultiheadAttention uses the weight functionally"
        return "its forward hook never fired in this step (the weight was used functionally, or not at all)"
    if layer.kind == "experts" and tokens < LEAST_TOKENS:
        return f"only {tokens} tokens were routed to it" if tokens else "no token was routed to it"
    if grad is None:
        return "no gradient reached it in this step"
    if not math.isfinite(stable):
        return "its inputs are zero or not finite"
    return "" if math.isfinite(nuclear) else "its gradient is zero or not finite"


def spectra_of(layers: list[Layer], gathered: Gathered, step: int) -> Iterator[dict[str, Any]]:
    """Full spectra: eigenvalues of the inputs' Gram matrix over its trace, and singular values of the gradient."""
    from specgrad.linalg.ranks import gram_eigenvalues

    for layer in layers:
        grad = gathered.grads.get(layer.parameter)
        for block in layer.blocks if layer.kind != "gain" else ():
            found = gathered.inputs.get((layer.name, block.stream))
            values: list[float] = []
            if layer.name in gathered.counts:
                counts = gathered.counts[layer.name].counts.double().sort(descending=True).values
                values = (counts / counts.sum().clamp(min=1)).tolist()
            elif found is not None and found.gram is not None:
                part = found.restricted(block.columns) if block.columns is not None else found
                assert part.gram is not None
                eigenvalues = gram_eigenvalues(part.gram)
                values = (eigenvalues / eigenvalues.sum()).tolist()
            singular = torch.empty(0)
            if grad is not None:
                dense = grad.to_dense() if grad.is_sparse else grad
                singular = squared_singular_values(layer.matrix(dense, block)).sqrt()
            yield {"step": step, "layer": layer.block_name(block), "inputs": values, "gradient": singular.tolist()}
