"""What one measured step gathers: input statistics and gradients, until they are turned into records."""

import sys
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from specgrad.probe.inputs import InputStatistics, TokenCounts
from specgrad.probe.layers import Layer
from specgrad.probe.streams import Incoming, fits, incoming, masked


def in_backward() -> bool:
    """Whether the autograd engine is at work on this thread, as it is while a checkpointed region is recomputed."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    return current is not None and current() != -1


@dataclass
class Gathered:
    """Statistics of the step in progress.

    Attributes:
        exact: whether Gram matrices are computed instead of estimates.
        starts: top directions of the last measurement, by layer and stream.
        inputs: statistics by layer and stream.
        counts: token counts by layer.
        grads: gradients by parameter name.
        mask: positions that count, or None for all.
        mask_fits: whether any layer's input has the mask's axes.
    """

    exact: bool
    starts: dict[tuple[str, int], Tensor]
    inputs: dict[tuple[str, int], InputStatistics] = field(default_factory=dict)
    counts: dict[str, TokenCounts] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    mask: Tensor | None = None
    mask_fits: bool = False
    _forward: dict[str, int] = field(default_factory=dict)
    _recomputed: dict[str, int] = field(default_factory=dict)
    # Projections that read the same tensor in the same state (queries, keys, values) share one measurement.
    _last: tuple[weakref.ReferenceType[Tensor], int, int, InputStatistics] | None = None
    _number: int = 0

    def on_call(self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Adds the inputs of one call of a layer's module."""
        if not torch.is_grad_enabled() or self._is_recomputation(layer):
            return
        if self.mask is not None and not self.mask_fits:
            self.mask_fits = any(fits(x, self.mask) for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if layer.kind == "embedding" and isinstance(module, nn.Embedding):
            ids = masked(args[0] if args else kwargs["input"], self.mask)
            empty = TokenCounts(torch.zeros(module.num_embeddings, dtype=torch.int64))
            self.counts.setdefault(layer.name, empty).add(ids, module.padding_idx)
            return
        for part in incoming(layer, module, args, kwargs, self.mask):
            self._add(layer, part)

    def on_grad(self, name: str, parameter: Tensor) -> None:
        """Keeps the gradient as it is after this backward pass; the last one of a step counts."""
        if parameter.grad is not None:
            self.grads[name] = parameter.grad.detach().clone()

    def _is_recomputation(self, layer: Layer) -> bool:
        """Whether a call inside backward repeats one that was counted, as activation checkpointing does.

        The reentrant kind runs the first pass without gradients, where nothing is counted, so that its second one is the
        one that counts.
        """
        if not in_backward():
            self._forward[layer.parameter] = self._forward.get(layer.parameter, 0) + 1
            return False
        self._recomputed[layer.parameter] = self._recomputed.get(layer.parameter, 0) + 1
        return self._recomputed[layer.parameter] <= self._forward.get(layer.parameter, 0)

    def _add(self, layer: Layer, part: Incoming) -> None:
        key = (layer.name, part.stream)
        known = self.inputs.get(key)
        basis = known.basis if known is not None else None
        exact = self.exact or any(block.columns is not None for block in layer.blocks)
        shareable = part.tensor is not None and layer.kind != "convolution"
        if self._last is not None and part.tensor is not None and shareable:
            seen, version, basis_id, statistics = self._last
            same = seen() is part.tensor and part.tensor._version == version
            if same and basis_id == id(basis) and exact == (statistics.gram is not None):
                self._merge(key, statistics)
                return
        found = InputStatistics.of(part.build(), self._number, exact=exact, basis=basis, start=self.starts.get(key))
        self._number += 1
        if part.tensor is not None and shareable:
            self._last = weakref.ref(part.tensor), part.tensor._version, id(basis), found
        self._merge(key, found)

    def _merge(self, key: tuple[str, int], found: InputStatistics) -> None:
        # A basis chosen on this step's first input is the one of all later ones.
        self.inputs.setdefault(key, InputStatistics()).add(found)


class EagerCompiled:
    """While active, compiled models run eagerly, so that hooks fire whatever the order of compiling and attaching."""

    def __init__(self) -> None:
        self._stance: Any = None

    def start(self) -> None:
        """Suspends compiled code, if there is any."""
        if self._stance is None and "torch._dynamo" in sys.modules:
            self._stance = torch.compiler.set_stance("force_eager")

    def missed(self) -> bool:
        """Whether something was compiled since `start` found nothing to suspend, hooks and all."""
        return self._stance is None and "torch._dynamo" in sys.modules

    def stop(self) -> None:
        """Lets compiled code run again."""
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
