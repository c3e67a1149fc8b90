"""Sampled directional derivatives of the loss of each sequence, along both directions of every block.

    s_seq(D) = sum_{t in sequence} g_t . D a_t

with a_t the inputs of a layer and g_t the gradients at its outputs for sampled labels. The products D a_t serve all draws; a
draw costs a backward pass to the layers' outputs, without gradients of weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from specgrad.probe.directions import Target, find_targets
from specgrad.probe.gathering import in_backward
from specgrad.probe.layers import Layer
from specgrad.probe.objective import Objective, plain_backward

# Along the gradient of a pass the scores of its true labels must add up to the gradient's squared norm, and the scores of
# one sequence must be the inner products with its own gradient. A larger difference, relative to the norms, means that the
# weight is used outside the hooks or that they cannot tell sequences apart; it is then measured in the slower way.
_LARGEST_GAP = 0.02


def sampled_scores(
    chosen: list[list[Layer]], objective: Objective, draws: int, seed: int
) -> list[tuple[Target, Float[Tensor, "blocks 2 draws sequences"]]]:
    """Targets and their scores at sampled labels, first along the Euclidean, then along the spectral direction.

    Args:
        chosen: layers by parameter, as `specgrad.probe.directions.chosen_layers` gives them.
        objective: the loss.
        draws: label draws.
        seed: seed of the labels.
    """
    watched = [number for number, group in enumerate(chosen) if all(map(_hookable, group))]
    passes = _Passes(chosen, watched, objective.sequences <= objective.chunk)
    with passes.hooked():
        targets = find_targets(chosen, objective, passes.backward)
        scores = [torch.zeros(len(t.blocks), 2, draws, objective.sequences, dtype=torch.float64) for t in targets]
        _by_hooks(targets, passes, objective, draws, _generator(objective, seed), scores)
    slow = [number for number in range(len(chosen)) if number not in watched or number in passes.lost]
    if slow:
        _by_gradients(targets, slow, objective, draws, _generator(objective, seed), scores)
    return list(zip(targets, scores, strict=True))


def _hookable(layer: Layer) -> bool:
    """Whether inputs and output gradients of all blocks can be seen at the module, and blocks split outputs only."""
    known = isinstance(layer.module, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    known = known or type(layer.module).__name__ == "Conv1D"
    return known and layer.kind in ("linear", "embedding", "convolution") and all(b.columns is None for b in layer.blocks)


def _generator(objective: Objective, seed: int) -> torch.Generator:
    return torch.Generator(next(objective.model.parameters()).device).manual_seed(seed + 7919 * objective.rank)


@dataclass
class _Call:
    """One call of a layer's module; ``number`` is that of its parameter."""

    number: int
    layer: Layer
    inputs: Tensor
    output: Tensor


@dataclass
class _Passes:
    """Forward passes whose layers are watched.

    Attributes:
        chosen: layers by parameter.
        watched: numbers of the parameters whose modules have hooks.
        keep: whether the graph of a pass outlives its backward pass, as it does where one pass takes the whole batch.
        calls: of the last pass.
        outputs: of the last pass, if its graph is kept.
        images: products of the layers' inputs with the gradient of that pass.
        lost: numbers of the parameters whose use the hooks do not see as it is.
    """

    chosen: list[list[Layer]]
    watched: list[int]
    keep: bool
    calls: list[_Call] = field(default_factory=list)
    outputs: Tensor | None = None
    images: dict[int, Tensor] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Hooks at the modules; what they saw is dropped on exit."""
        handles = [
            module.register_forward_hook(self._hook(i, layer), with_kwargs=True)
            for i in self.watched
            for layer in self.chosen[i]
            for module in layer.modules
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.calls.clear()
            self.outputs = None

    def _hook(self, number: int, layer: Layer) -> Any:
        def on_output(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # Activation checkpointing calls modules again inside backward.
            if isinstance(output, Tensor) and output.requires_grad and not in_backward():
                inputs = args[0] if args else next(iter(kwargs.values()))
                self.calls.append(_Call(number, layer, inputs.detach(), output))

        return on_output

    def forward(self, objective: Objective, part: slice) -> Tensor:
        """Outputs of a part of the batch, from the kept graph if there is one."""
        if self.outputs is not None:
            return self.outputs
        self.calls.clear()
        return objective.outputs(part)

    def backward(self, outputs: Tensor, summed: Tensor, weights: list[Tensor]) -> list[Tensor | None]:
        """Gradients of the weights; those at the layers' outputs say whether the hooks see every use."""
        calls = list(self.calls)
        both = plain_backward(outputs, summed, [*weights, *(call.output for call in calls)], self.keep)
        found, at_outputs = both[: len(weights)], both[len(weights) :]
        totals = dict.fromkeys(self.watched, 0.0)
        for place, (call, g) in enumerate(zip(calls, at_outputs, strict=True)):
            gradient = found[call.number]
            if g is None or gradient is None or call.number in self.lost:
                continue
            image = _image(call, gradient)
            totals[call.number] += float(torch.linalg.vecdot(_wide(g), _wide(image)).sum(dtype=torch.float64))
            if self.keep:
                self.images[place] = image
        for number, total in totals.items():
            gradient = found[number]
            known = 0.0 if gradient is None else float(_wide(gradient).square().sum(dtype=torch.float64))
            if not abs(total - known) <= _LARGEST_GAP * known:
                self.lost.add(number)
        if self.keep:
            self.outputs = outputs
        else:
            self.calls.clear()
        return found


def _by_hooks(
    targets: list[Target], passes: _Passes, objective: Objective, draws: int, generator: torch.Generator,
    scores: list[Tensor],
) -> None:  # fmt: skip
    """Scores from inputs and output gradients at the modules; a target for which that does not work is lost."""
    for part in objective.parts() if not passes.lost.issuperset(passes.watched) else ():
        outputs = passes.forward(objective, part)
        images: dict[int, list[Tensor]] = {}
        calls = {place: call for place, call in enumerate(passes.calls) if call.number not in passes.lost}
        for place, call in list(calls.items()):
            target = targets[call.number]
            known = passes.images.pop(place, None) if objective.group is None else None
            image = _image(call, target.euclidean) if known is None else known / target.units
            sides = [_by_sequence(call, x, part) for x in (image, _image(call, target.spectral))]
            if sides[0] is None or sides[1] is None:
                passes.lost.add(call.number)
            else:
                images[place] = [sides[0], sides[1]]
        calls = {place: call for place, call in calls.items() if call.number not in passes.lost}
        for draw in range(draws if calls else 0):
            v = objective.likelihood.score(outputs.detach(), objective.targets[part], generator)
            at = [call.output for call in calls.values()]
            grads = torch.autograd.grad(outputs, at, v, retain_graph=draw < draws - 1, allow_unused=True)
            for (place, call), g in zip(calls.items(), grads, strict=True):
                ordered = None if g is None else _by_sequence(call, g, part)
                if ordered is not None:
                    for side, image in enumerate(images[place]):
                        scores[call.number][:, side, draw, part] += _per_block(call.layer, ordered, image).cpu()
        if calls:
            # Only now: looking up an embedding with `max_norm` changes it, which the graph of the pass would not survive.
            seen = sorted({call.number for call in calls.values()})
            found = {number: scores[number][:, :, draws - 1, part.start].sum(0) for number in seen}
            passes.lost |= _wrong(targets, found, objective, slice(part.start, part.start + 1), v[:1])


def _wrong(
    targets: list[Target], found: dict[int, Float[Tensor, " 2"]], objective: Objective, one: slice, v: Tensor
) -> set[int]:
    """The targets whose scores of one sequence are not those that its own gradient gives."""
    outputs = objective.outputs(one)
    grads = torch.autograd.grad(outputs, [targets[i].layer.weight for i in found], v, allow_unused=True)
    wrong = set()
    for (number, scores), gradient in zip(found.items(), grads, strict=True):
        target = targets[number]
        for score, whole in zip(scores.tolist(), (target.euclidean, target.spectral), strict=True):
            g = torch.zeros_like(whole) if gradient is None else gradient.to_dense() if gradient.is_sparse else gradient
            true = float((g.to(whole.dtype) * whole).sum(dtype=torch.float64))
            if not abs(score - true) <= _LARGEST_GAP * float(g.norm()) * float(whole.norm()):
                wrong.add(number)
    return wrong


def _by_gradients(
    targets: list[Target], slow: list[int], objective: Objective, draws: int, generator: torch.Generator,
    scores: list[Tensor],
) -> None:  # fmt: skip
    """Scores as inner products with the gradient of each sequence alone: slower, and blind to how a weight is used."""
    weights = [targets[number].layer.weight for number in slow]
    for number in slow:
        scores[number].zero_()
    for part in objective.parts(1):
        outputs = objective.outputs(part)
        for draw in range(draws):
            v = objective.likelihood.score(outputs.detach(), objective.targets[part], generator)
            grads = torch.autograd.grad(outputs, weights, v, retain_graph=draw < draws - 1, allow_unused=True)
            for number, gradient in zip(slow, grads, strict=True):
                if gradient is None:
                    continue
                target = targets[number]
                g = (gradient.to_dense() if gradient.is_sparse else gradient).to(target.euclidean.dtype)
                for side, whole in enumerate((target.euclidean, target.spectral)):
                    product = g * whole
                    for i, block in enumerate(target.blocks):
                        value = target.layer.matrix(product, block).sum(dtype=torch.float64)
                        scores[number][i, side, draw, part.start] = value.cpu()


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


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@torch.no_grad()
def _by_sequence(call: _Call, tensor: Tensor, part: slice) -> Tensor | None:
    """Something at a layer's output as sequences x tokens x features; None if the sequences cannot be told apart."""
    size = part.stop - part.start
    x = _wide(tensor.movedim(1, -1) if call.layer.kind == "convolution" else tensor)
    if x.shape[0] == size or (x.ndim == 2 and x.shape[0] % size == 0):
        return x.reshape(size, -1, x.shape[-1])
    if x.ndim > 2 and x.shape[1] == size and call.layer.kind != "convolution":
        return x.transpose(0, 1).reshape(size, -1, x.shape[-1])
    return None


@torch.no_grad()
def _per_block(layer: Layer, g: Tensor, image: Tensor) -> Float[Tensor, "blocks sequences"]:
    """Inner products over tokens and over the output features of each block."""
    found = []
    for block in layer.blocks:
        # A group of a convolution has one index; a block of a matrix, one for each of its axes.
        rows = block.index[1 if layer.transposed else 0] if block.index else slice(None)
        found.append(torch.linalg.vecdot(g[..., rows], image[..., rows]).sum(1, dtype=torch.float64))
    return torch.stack(found)
