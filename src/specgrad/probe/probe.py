"""`Probe`: watches a training loop and measures, layer by layer, whether a spectral step is favoured."""

import math
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from specgrad.linalg.ranks import gram_eigenvalues, nuclear_rank_of_squares, short_gram
from specgrad.probe.condition import condition
from specgrad.probe.layers import EmbeddingInputs, Layer, LinearInputs, find_layers, gram_of
from specgrad.probe.report import ProbeReport


class Probe:
    """Measures stable rank of inputs and nuclear rank of gradients of every Linear and Embedding while a model trains.

    Use it as a context manager around the training loop and call `step` once per optimizer step, after the backward
    pass; gradients are read as they are accumulated, so `step` may come before or after ``zero_grad``. On a measured step
    every forward pass with gradients enabled is counted, so gradient accumulation is measured as one batch. Weights,
    gradients and random numbers are not touched.

    Args:
        model: the model being trained.
        every: measure on steps 0, ``every``, 2 ``every``, ...; >= 1.
        pattern: probe only layers whose name contains this regular expression.

    Raises:
        ValueError: if ``every`` < 1 or no layer can be probed.

    Cost: on a measured step one Gram matrix per distinct input (``tokens k^2`` multiply-adds for k features) and two
    symmetric eigenvalue problems per layer; otherwise one inactive hook per layer.

    Example:
        >>> model = nn.Linear(8, 4)
        >>> with Probe(model, every=1) as probe:
        ...     model(torch.ones(16, 8)).square().sum().backward()
        ...     rows = probe.step()
        >>> [round(rows[0][key], 6) for key in ("stable_rank", "nuclear_rank")]
        [1.0, 1.0]

    Source: Davis and Drusvyatskiy (arXiv 2512.04299), sections 4 and 5.
    """

    def __init__(self, model: nn.Module, every: int = 50, pattern: str | None = None) -> None:
        if every < 1:
            raise ValueError(f"`every` of `Probe` must be >= 1; got {every}.")
        self.layers, self.skipped = find_layers(model, pattern)
        self.every = every
        self.records: list[dict[str, Any]] = []
        self._step = 0
        self._handles: list[RemovableHandle] = []
        self._reset()

    def __enter__(self) -> "Probe":
        return self.attach()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()

    def attach(self) -> "Probe":
        """Registers the hooks; the context manager does it for you."""
        if not self._handles:
            for layer in self.layers:
                on_input, on_grad = _Hook(self._on_input, layer), _Hook(self._on_grad, layer)
                self._handles.append(layer.module.register_forward_pre_hook(on_input, with_kwargs=True))
                self._handles.append(layer.module.weight.register_post_accumulate_grad_hook(on_grad))
        return self

    def detach(self) -> None:
        """Removes the hooks and drops what an unfinished step has gathered; finished measurements stay."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._reset()

    @property
    def measuring(self) -> bool:
        """Whether the step in progress is measured."""
        return self._step % self.every == 0 or self._forced

    def measure_now(self) -> None:
        """Measures the step in progress too, whatever ``every`` says; call it before the forward pass."""
        self._forced = True

    def resume_at(self, step: int) -> None:
        """Sets the index of the next step, so that a resumed run measures the steps an uninterrupted one would."""
        if step < 0:
            raise ValueError(f"`step` of `Probe.resume_at` must be >= 0; got {step}.")
        self._step = step

    def step(self) -> list[dict[str, Any]]:
        """Ends an optimizer step.

        Returns:
            One record per layer on a measured step, else an empty list: ``step``, ``layer``, ``kind``, ``rows``,
            ``cols``, ``tokens``, ``stable_rank``, ``nuclear_rank``, ``ratio``, ``verdict`` and ``reason`` (empty unless
            undefined).

        Raises:
            RuntimeError: if the probe is not attached.
        """
        if not self._handles:
            raise RuntimeError("`Probe.step` needs attached hooks; use the probe in a `with` block or call `attach`.")
        measured: list[dict[str, Any]] = []
        if self.measuring:
            known: dict[tuple[int, ...], float] = {}
            measured = [self._record(layer, known) for layer in self.layers]
            self.records += measured
        self._step += 1
        self._reset()
        return measured

    def report(self) -> ProbeReport:
        """All measurements so far.

        Raises:
            RuntimeError: if nothing has been measured yet.
        """
        if not self.records:
            raise RuntimeError("`Probe.report` needs at least one measured step; call `step` after a backward pass.")
        return ProbeReport(list(self.records), dict(self.skipped))

    def _reset(self) -> None:
        self._forced = False
        self._inputs: dict[str, LinearInputs | EmbeddingInputs] = {}
        self._grads: dict[str, Tensor] = {}
        # Projections that read the same tensor in the same state (queries, keys, values) share one Gram matrix.
        self._last_input: tuple[weakref.ReferenceType[Tensor], int] | None = None
        self._last_gram: tuple[Tensor, int] | None = None
        self._gram_number = 0

    def _on_input(self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (self.measuring and torch.is_grad_enabled()):
            return
        inputs = args[0] if args else kwargs["input"]
        statistics = self._inputs.setdefault(layer.name, layer.new_inputs())
        if isinstance(statistics, EmbeddingInputs):
            statistics.add(inputs, getattr(module, "padding_idx", None))
            return
        if self._last_gram is None or self._last_input is None or not _is_same(inputs, *self._last_input):
            self._last_gram = gram_of(inputs)
            self._last_input = weakref.ref(inputs), inputs._version
            self._gram_number += 1
        statistics.add(*self._last_gram, self._gram_number)

    def _on_grad(self, layer: Layer, parameter: Tensor) -> None:
        if self.measuring and parameter.grad is not None:
            self._grads[layer.name] = parameter.grad.detach().clone()

    def _record(self, layer: Layer, known: dict[tuple[int, ...], float]) -> dict[str, Any]:
        rows, cols = layer.module.weight.shape
        record: dict[str, Any] = {
            "step": self._step,
            "layer": layer.name,
            "kind": layer.kind,
            "rows": rows,
            "cols": cols,
        }
        inputs, grad = self._inputs.get(layer.name), self._grads.get(layer.name)
        stable = nuclear = math.nan
        if inputs is not None:
            key = tuple(inputs.sources) if isinstance(inputs, LinearInputs) else (id(inputs),)
            stable = known[key] = known.get(key) or inputs.stable_rank()
        if grad is not None:
            dense = grad.to_dense() if grad.is_sparse else grad
            nuclear = float(nuclear_rank_of_squares(gram_eigenvalues(short_gram(dense))))
        outcome = condition(nuclear, stable)
        return record | {
            "tokens": inputs.tokens if inputs is not None else 0,
            "stable_rank": stable,
            "nuclear_rank": nuclear,
            "ratio": outcome.ratio,
            "verdict": outcome.verdict,
            "reason": _why_undefined(inputs, grad, stable, nuclear),
        }


class _Hook:
    """A hook that stays with its model: a copied or pickled model carries one that does nothing."""

    def __init__(self, call: Callable[..., None], layer: Layer) -> None:
        self.call, self.layer = call, layer

    def __call__(self, *arguments: Any) -> None:
        self.call(self.layer, *arguments)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _idle_hook, ()


def _idle_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*arguments: Any) -> None:
    return None


def _is_same(inputs: Tensor, last: weakref.ReferenceType[Tensor], version: int) -> bool:
    """Whether a tensor is the one seen last, and not changed in place since."""
    return last() is inputs and inputs._version == version


def _why_undefined(inputs: object | None, grad: Tensor | None, stable: float, nuclear: float) -> str:
    if inputs is None:
        return "its forward hook never fired in this step (the weight was used functionally, or not at all)"
    if grad is None:
        return "no gradient reached it in this step"
    if not math.isfinite(stable):
        return "its inputs are zero or not finite"
    return "" if math.isfinite(nuclear) else "its gradient is zero or not finite"
