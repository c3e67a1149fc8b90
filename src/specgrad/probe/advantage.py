"""Level 2: the predicted advantage of a spectral step, with real curvature instead of two bounds.

On one block moved alone, a quadratic model of the loss with curvature q gives the best step along -D the decrease
``<G, D>^2 / (2 q(D))``. The advantage is the ratio of that decrease along ``polar(G)`` to the one along G:

    R_q = (|G|_*^2 / q(polar G)) / (|G|_F^4 / q(G)),   q(D) = (1/N) E sum_sequences (sum_{t in sequence} g_t . D a_t)^2

with g_t the gradients at the layer's outputs of the summed loss at labels sampled from the model: an unbiased estimate of
the Gauss-Newton form, since draws in different sequences are independent with mean zero. Each draw costs one backward pass
to the layers' outputs and serves all blocks and both directions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specgrad.probe.directions import Target, block_records, find_targets
from specgrad.probe.gauss_newton import gauss_newton_records
from specgrad.probe.layers import Layer, find_layers
from specgrad.probe.likelihoods import likelihood_of
from specgrad.probe.objective import Forward, Objective, default_forward, untouched

# Sequences times draws: the standard error of the log advantage is about one over its square root, 6 %, against a spread
# of 16 to 40 % between the blocks of a network.
ENOUGH = 256

# Sums over sequences of the true gradient must give back its norm; more than this relative difference means that the weight
# is used outside the hooks, and takes the slower way.
_LARGEST_GAP = 0.02


def measure_advantage(
    model: nn.Module,
    inputs: Any,
    targets: Tensor,
    loss: Any = "cross_entropy",
    *,
    forward: Forward | None = None,
    pattern: str | None = None,
    method: str = "fisher",
    draws: int | None = None,
    chunk: int = 16,
    gains: bool = False,
    seed: int = 0,
    step: int = 0,
    layers: list[Layer] | None = None,
    group: Any = None,
) -> list[dict[str, Any]]:
    """Predicted one-step advantage of a spectral over a Euclidean step, block by block, at the present weights.

    The model is evaluated in eval mode (no dropout) on the batch given; weights, gradients, buffers and random numbers are
    left as they were. Early in training nothing predicts well; ``method="gauss_newton"`` says so.

    Args:
        model: the model.
        inputs: a tensor, tuple or mapping of tensors with independent sequences along the first axis.
        targets: likewise.
        loss: see `specgrad.probe.likelihood_of`.
        forward: (model, inputs) -> outputs; default: call the model, take ``.logits``.
        pattern: measure only layers whose name contains this regular expression.
        method: ``fisher`` (all blocks at once, sampled) or ``gauss_newton`` (exact, two forward-mode passes and two forward
            passes per block: for chosen blocks).
        draws: label draws; default: enough for 256 sequences times draws.
        chunk: sequences per forward pass.
        gains: include norm gains (sign against gradient step).
        seed: seed of the sampled labels.
        step: recorded with the result.
        layers: as `specgrad.probe.layers.find_layers` gives them; default: all of the model.
        group: process group whose ranks hold equal parts of the batch and the same weights.

    Returns:
        One record per block: ``layer``, ``advantage``, ``log_error`` (standard error of its logarithm),
        ``decrease_euclidean`` and ``decrease_spectral`` (predicted, in units of the loss), ``step_euclidean`` and
        ``step_spectral`` (the predicted best multiples of G and polar(G)), ``method``, ``sequences``, ``draws``,
        ``rho_euclidean`` and ``rho_spectral`` (realised over predicted decrease at those steps; NaN for ``fisher``) and
        ``reason``: why there is no value, else empty.

    Raises:
        ValueError: for a loss without sampler, an unknown method, or settings out of range.

    Cost: in forward-and-backward passes of the batch, about 2.5 (the gradient, polar factors, a check) and 0.55 per draw;
        weights that no hook sees (attention's in_proj, stacked experts) one per draw on top.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(64, 6), torch.randn(64, 4)
        >>> (record,) = measure_advantage(nn.Linear(6, 4, bias=False), x, y, "mse", method="gauss_newton")
        >>> record["layer"], round(record["rho_spectral"], 4)
        ('weight', 1.0)

    Source: ours; Martens, New insights and perspectives on the natural gradient method (2020), section 9, for Fisher and
        Gauss-Newton.
    """
    if method not in ("fisher", "gauss_newton"):
        raise ValueError(f"`method` of `measure_advantage` must be fisher or gauss_newton; got {method!r}.")
    if draws is not None and draws < 1:
        raise ValueError(f"`draws` of `measure_advantage` must be >= 1; got {draws}.")
    objective = Objective(model, inputs, targets, likelihood_of(loss), forward or default_forward, chunk, group)
    layers = find_layers(model)[0] if layers is None else layers
    with untouched(model):
        chosen = find_targets(layers, objective, pattern, gains)
        if method == "gauss_newton":
            return [record for target in chosen for record in gauss_newton_records(target, objective, step)]
        draws = draws or math.ceil(ENOUGH / len(objective.gathered(torch.zeros(objective.sequences))))
        scores = _sampled(chosen, objective, draws, seed)
    return [r for target in chosen for r in _records(target, scores[id(target)], objective, draws, step)]


def _records(target: Target, scores: "_Scores", objective: Objective, draws: int, step: int) -> list[dict[str, Any]]:
    records = []
    for i, (_, slopes, about) in enumerate(block_records(target, step)):
        euclidean, spectral = (objective.gathered(scores.of(i, side)).square() for side in (0, 1))
        # Mean over draws of the sum over sequences, per unit of the loss.
        q = [float(s.sum()) / draws / target.units for s in (euclidean, spectral)]
        values = {"advantage": math.nan, "log_error": math.nan}
        decreases = [s * s / (2 * c) if c > 0 else math.nan for s, c in zip(slopes, q, strict=True)]
        steps = [s / c if c > 0 else math.nan for s, c in zip(slopes, q, strict=True)]
        if not about["reason"] and not min(q) > 0:
            about["reason"] = "its sampled curvature is zero"
        if not about["reason"]:
            spread = euclidean / euclidean.mean() - spectral / spectral.mean()
            error = float(spread.std() / spread.numel() ** 0.5) if spread.numel() > 1 else math.nan
            values = {"advantage": decreases[1] / decreases[0], "log_error": error}
        records.append(
            about | values
            | {"decrease_euclidean": decreases[0], "decrease_spectral": decreases[1]}
            | {"step_euclidean": steps[0], "step_spectral": steps[1], "method": "fisher"}
            | {"sequences": len(euclidean) // draws, "draws": draws, "rho_euclidean": math.nan, "rho_spectral": math.nan}
        )  # fmt: skip
    return records


@dataclass
class _Scores:
    """Per block and direction, the directional derivatives of every draw and sequence."""

    values: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)

    def add(self, block: int, side: int, scores: Tensor) -> None:
        self.values.setdefault((block, side), []).append(scores.double().cpu())

    def of(self, block: int, side: int) -> Tensor:
        return torch.cat(self.values[block, side]) if (block, side) in self.values else torch.zeros(1, dtype=torch.float64)


def _sampled(targets: list[Target], objective: Objective, draws: int, seed: int) -> dict[int, _Scores]:
    scores = {id(target): _Scores() for target in targets}
    slow = [target for target in targets if any(not _hookable(layer) for layer in target.layers)]
    fast = [target for target in targets if target not in slow]
    missed = _by_hooks(fast, objective, draws, seed, scores) if fast else []
    for target in missed:
        scores[id(target)] = _Scores()
    slow += missed
    if slow:
        _by_sequence(slow, objective, draws, seed, scores)
    return scores


def _hookable(layer: Layer) -> bool:
    """Whether inputs and output gradients of all blocks can be seen at the module, and blocks split outputs only."""
    known = isinstance(layer.module, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    known = known or type(layer.module).__name__ == "Conv1D"
    return known and layer.kind in ("linear", "embedding", "convolution") and all(b.columns is None for b in layer.blocks)


def _generator(objective: Objective, seed: int) -> torch.Generator:
    return torch.Generator(next(objective.model.parameters()).device).manual_seed(seed + 7919 * objective.rank)


@dataclass
class _Call:
    target: Target
    layer: Layer
    inputs: Tensor
    output: Tensor


def _by_hooks(
    targets: list[Target], objective: Objective, draws: int, seed: int, scores: dict[int, _Scores]
) -> list[Target]:
    """Scores from inputs and output gradients at the modules; returns the targets for which that does not work."""
    calls: list[_Call] = []

    def hook(target: Target, layer: Layer) -> Callable[..., None]:
        def on_output(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                calls.append(_Call(target, layer, (args[0] if args else next(iter(kwargs.values()))).detach(), output))

        return on_output

    handles = [
        module.register_forward_hook(hook(target, layer), with_kwargs=True)
        for target in targets
        for layer in target.layers
        for module in layer.modules
    ]
    lost: set[int] = set()
    found: dict[int, float] = {id(target): 0.0 for target in targets}
    generator = _generator(objective, seed)
    try:
        for part in objective.parts():
            calls.clear()
            outputs = objective.outputs(part)
            size = part.stop - part.start
            summed = objective.likelihood.loss(outputs, objective.targets[part])
            (truth,) = torch.autograd.grad(summed, outputs, retain_graph=True)
            images: dict[int, list[Tensor]] = {}
            live = [call for call in calls if id(call.target) not in lost]
            for draw in range(draws + 1):
                # Draw 0 takes the true labels: their scores must add up to the gradient that is already known.
                v = truth if draw == 0 else objective.likelihood.score(outputs.detach(), objective.targets[part], generator)
                grads = torch.autograd.grad(
                    outputs, [c.output for c in live], v, retain_graph=draw < draws, allow_unused=True
                )
                sums: dict[tuple[int, int, int], Tensor] = {}
                for number, (call, g) in enumerate(zip(live, grads, strict=True)):
                    if g is None:
                        continue
                    if number not in images:
                        images[number] = [_image(call, d) for d in (call.target.euclidean, call.target.spectral)]
                    for side in (0, 1):
                        per_block = _per_sequence(call, g, images[number][side], size)
                        if per_block is None:
                            lost.add(id(call.target))
                            continue
                        for i, s in enumerate(per_block):
                            key = (id(call.target), i, side)
                            sums[key] = sums[key] + s if key in sums else s
                for (target_id, i, side), s in sums.items():
                    if draw > 0:
                        scores[target_id].add(i, side, s)
                    elif side == 0:
                        found[target_id] += float(s.sum())
    finally:
        for handle in handles:
            handle.remove()
    sums_of = objective.summed(torch.tensor([found[id(target)] for target in targets], dtype=torch.float64))
    unclear = objective.summed(torch.tensor([float(id(target) in lost) for target in targets]))
    for target, total, missed in zip(targets, sums_of.tolist(), unclear.tolist(), strict=True):
        known = target.units * sum(target.slopes(block)[0] for block in target.blocks)
        if missed or not abs(total - known) <= _LARGEST_GAP * known:
            lost.add(id(target))
    return [target for target in targets if id(target) in lost]


@torch.no_grad()
def _image(call: _Call, direction: Tensor) -> Tensor:
    """The layer's output change along a direction of its weight."""
    module, x = call.layer.module, call.inputs
    direction = direction.to(call.output.dtype)
    if isinstance(module, nn.Embedding):
        return F.embedding(x, direction)
    x = x.to(call.output.dtype)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        found: Tensor = module._conv_forward(x, direction, None)
        return found
    return F.linear(x, direction.mT if call.layer.transposed else direction)


@torch.no_grad()
def _per_sequence(call: _Call, g: Tensor, image: Tensor, size: int) -> list[Tensor] | None:
    """``sum_t g_t . D a_t`` of each sequence for each block; None if the sequences cannot be told apart."""
    products = g.float() * image.float() if g.dtype != torch.float64 else g * image
    if call.layer.kind == "convolution":
        products = products.movedim(1, -1)
    if products.shape[0] != size:
        if products.ndim >= 3 and products.shape[0] > 1 and products.shape[1] == size:
            products = products.transpose(0, 1)
        elif products.ndim == 2 and products.shape[0] % size == 0:
            products = products.reshape(size, -1, products.shape[-1])
        else:
            return None
    if len(call.layer.blocks) == 1:
        return [products.flatten(1).sum(1, dtype=torch.float64)]
    flat = products.reshape(size, -1, products.shape[-1]).sum(1, dtype=torch.float64)
    place = 1 if call.layer.transposed else 0
    return [flat[:, block.index[place]].sum(1) for block in call.layer.blocks]


def _by_sequence(targets: list[Target], objective: Objective, draws: int, seed: int, scores: dict[int, _Scores]) -> None:
    """Scores as inner products with the gradient of each sequence alone: slower, and blind to how a weight is used."""
    weights = [target.layer.weight for target in targets]
    generator = _generator(objective, seed)
    for part in objective.parts(1):
        outputs = objective.outputs(part)
        for draw in range(draws):
            v = objective.likelihood.score(outputs.detach(), objective.targets[part], generator)
            grads = torch.autograd.grad(outputs, weights, v, retain_graph=draw < draws - 1, allow_unused=True)
            for target, gradient in zip(targets, grads, strict=True):
                if gradient is None:
                    continue
                g = (gradient.to_dense() if gradient.is_sparse else gradient).to(target.euclidean.dtype)
                for i, block in enumerate(target.blocks):
                    matrix = target.layer.matrix(g, block)
                    for side, whole in enumerate((target.euclidean, target.spectral)):
                        value = (matrix * target.layer.matrix(whole, block)).sum(dtype=torch.float64)
                        scores[id(target)].add(i, side, value.reshape(1))
