"""A batch and its loss, evaluated again and again without leaving a trace on the model."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specgrad.probe.distributed import whole_matrices
from specgrad.probe.likelihoods import Likelihood

Forward = Callable[[nn.Module, Any], Tensor]

# (outputs, summed loss, weights) of one forward pass -> gradients of the summed loss, None for a weight that is not used.
Backward = Callable[[Tensor, Tensor, list[Tensor]], list[Tensor | None]]


def default_forward(model: nn.Module, inputs: Any) -> Tensor:
    """Outputs of a model: a tensor is passed as it is, a tuple as arguments, a mapping by keyword; ``logits`` are taken.

    Raises:
        TypeError: if the model gives neither a tensor nor a tuple that begins with one nor ``logits``.
    """
    if isinstance(inputs, Mapping):
        outputs = model(**inputs)
    elif isinstance(inputs, tuple | list):
        outputs = model(*inputs)
    else:
        outputs = model(inputs)
    outputs = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    found = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    if not isinstance(found, Tensor):
        raise TypeError(
            f"`model` must return a tensor, a tuple that begins with one, or logits; got {type(found).__name__}. Give "
            "`forward`, a function of model and inputs that returns the outputs."
        )
    return found


@dataclass(frozen=True)
class Objective:
    """The training loss of one batch.

    Attributes:
        model: the model.
        inputs: tensors with the sequences (independent samples) along the first axis.
        targets: likewise.
        likelihood: the loss.
        forward: how outputs are computed.
        chunk: sequences per forward pass.
        group: process group over which the batch is split; every rank then holds its own part of the batch.
    """

    model: nn.Module
    inputs: Any
    targets: Tensor
    likelihood: Likelihood
    forward: Forward = default_forward
    chunk: int = 16
    group: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.targets, Tensor) or not self.targets.ndim:
            raise TypeError(
                "`targets` must be a tensor with the sequences along its first axis; got "
                f"{'a number' if isinstance(self.targets, Tensor) else type(self.targets).__name__}."
            )
        if not len(self.targets):
            raise ValueError("`targets` must hold at least one sequence; got none.")
        if not (isinstance(self.chunk, int) and self.chunk >= 1):
            raise ValueError(f"`chunk` must be an integer >= 1; got {self.chunk!r}.")

    @property
    def sequences(self) -> int:
        """Number of independent samples on this rank."""
        return len(self.targets)

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self.group is None:
            return tensor
        there = tensor.to(self._device, copy=True)
        torch.distributed.all_reduce(there, group=self.group)
        return there.to(tensor.device)

    @property
    def _device(self) -> torch.device:
        # Groups of accelerators sum what lies on accelerators alone.
        return next(self.model.parameters()).device

    def gathered(self, values: Tensor) -> Tensor:
        """The values of all ranks after each other; every rank has equally many."""
        if self.group is None:
            return values
        values = values.to(self._device)
        parts = [torch.empty_like(values) for _ in range(torch.distributed.get_world_size(self.group))]
        torch.distributed.all_gather(parts, values, group=self.group)
        return torch.cat(parts).cpu()

    def equal_parts(self) -> bool:
        """Whether all ranks hold equally many sequences."""
        mine = torch.tensor([1.0, self.sequences, self.sequences**2], dtype=torch.float64)
        ranks, total, squares = self.summed(mine).tolist()
        return bool(ranks * squares == total**2)

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return 0 if self.group is None else int(torch.distributed.get_rank(self.group))

    def parts(self, size: int | None = None) -> Iterator[slice]:
        """Consecutive ranges of sequences."""
        size = size or self.chunk
        for begin in range(0, self.sequences, size):
            yield slice(begin, min(begin + size, self.sequences))

    def outputs(self, part: slice) -> Tensor:
        """Outputs of a range of sequences."""
        return self.forward(self.model, _take(self.inputs, part, self.sequences))

    @torch.no_grad()
    def value(self) -> float:
        """The loss."""
        total, units = 0.0, 0.0
        for part in self.parts():
            outputs = self.outputs(part)
            total += float(self.likelihood.loss(outputs.double(), self.targets[part]))
            units += self.likelihood.units(outputs, self.targets[part])
        both = self.summed(torch.tensor([total, units], dtype=torch.float64))
        return float(both[0] / both[1])

    def gradients(self, weights: list[Tensor], backward: Backward | None = None) -> tuple[list[Tensor | None], float]:
        """Gradients of the summed loss, and the number of units; ``backward`` computes them for one part of the batch.

        Raises:
            ValueError: if the loss counts none of the targets.
        """
        sums: list[Tensor | None] = [None] * len(weights)
        units = 0.0
        for part in self.parts():
            outputs = self.outputs(part)
            units += self.likelihood.units(outputs.detach(), self.targets[part])
            found = (backward or plain_backward)(outputs, self.likelihood.loss(outputs, self.targets[part]), weights)
            sums = [s if g is None else g if s is None else s + g for s, g in zip(sums, found, strict=True)]
        if self.group is not None:
            sums = [self.summed(torch.zeros_like(w) if s is None else s) for s, w in zip(sums, weights, strict=True)]
            units = float(self.summed(torch.tensor([units], dtype=torch.float64)))
        if not units > 0:
            raise ValueError(
                f"`targets` must hold at least one that the loss counts; its {self.likelihood.name} counts none."
            )
        return sums, units


def plain_backward(
    outputs: Tensor, summed: Tensor, weights: list[Tensor], retain_graph: bool = False
) -> list[Tensor | None]:
    """Dense gradients of a summed loss."""
    found = torch.autograd.grad(summed, weights, allow_unused=True, retain_graph=retain_graph)
    return [g.to_dense() if g is not None and g.is_sparse else g for g in found]


def _take(inputs: Any, part: slice, sequences: int) -> Any:
    if isinstance(inputs, Tensor):
        return inputs[part] if inputs.ndim and len(inputs) == sequences else inputs
    if isinstance(inputs, Mapping):
        return {key: _take(value, part, sequences) for key, value in inputs.items()}
    if isinstance(inputs, tuple | list):
        return tuple(_take(value, part, sequences) for value in inputs)
    return inputs


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Evaluates a model in eval mode, eagerly, with gradients; restores modes, buffers and random numbers.

    Raises:
        ValueError: for sharded parameters that cannot be gathered.
    """
    modes = {module: module.training for module in model.modules()}
    # An embedding with `max_norm` shrinks its rows when they are looked up.
    shrinking = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and m.max_norm is not None]
    kept = [(tensor, tensor.detach().clone()) for tensor in (*model.buffers(), *shrinking)]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else None
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), whole_matrices(model):
            model.eval()
            yield
    finally:
        if stance is not None:
            stance.__exit__(None, None, None)
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for tensor, before in kept:
                tensor.copy_(before)
