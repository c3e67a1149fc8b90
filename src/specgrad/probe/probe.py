"""`Probe`: watches a training loop and measures, layer by layer, whether a spectral step is favoured."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from specgrad.optim.blocks import Blocks
from specgrad.probe.advantage import measure_advantage
from specgrad.probe.distributed import process_group, reduce_counts, reduce_gradient, reduce_inputs
from specgrad.probe.gain import measure_gain
from specgrad.probe.gathering import EagerCompiled, Gathered
from specgrad.probe.layers import Layer, find_layers
from specgrad.probe.records import records_of, spectra_of
from specgrad.probe.report import ProbeReport
from specgrad.probe.routing import Evidence

OnRecord = Callable[[int, dict[str, Any]], None]

_RESULTS = ("records", "advantages", "gains", "spectra")


class Probe:
    """Measures stable rank of inputs and nuclear rank of gradients of every weight matrix while a model trains.

    Use it as a context manager around the training loop and call `step` once per optimizer step, after the backward
    pass; gradients are read as they are accumulated, so `step` may come before or after ``zero_grad`` (fully sharded
    models: before). On a measured step every forward pass with gradients enabled is counted, so that micro-batches are
    measured as one batch. Between measured steps there are no hooks. Weights, gradients and random numbers are not touched.
    Compiled models run eagerly on measured steps, so that hooks fire; their weights then agree with an unprobed run up to
    the rounding of the compiler.

    Args:
        model: the model being trained, wrapped or not in DistributedDataParallel, ``fully_shard`` or ``torch.compile``.
        every: measure on steps 0, ``every``, 2 ``every``, ...; >= 1.
        pattern: probe only layers whose name contains this regular expression.
        exact: stable ranks from the eigenvalues of Gram matrices instead of warm-started estimates that never lie below
            the truth; distributed models are always measured exactly.
        blocks: regular expression on parameter names -> the matrices inside, as in `specgrad.optim.param_groups`.
        spectra_at: steps at which full spectra are kept in ``spectra``; they are measured exactly.
        shards: also give the nuclear rank over this many row shards, which a shardwise step is judged by.
        group: process group over which the batch is split, where the model's type does not tell.
        on_record: called with step and ``{"layer/quantity": number}`` after each measurement, as run trackers take it.

    Raises:
        TypeError: if ``model`` is no module.
        ValueError: if ``every`` or ``shards`` < 1, no layer can be probed, ``pattern`` is no regular expression, or
            ``blocks`` do not fit.

    Cost: on a measured step about ``12 n k`` FLOPs per distinct input of n tokens and k features with a mean spike (64
    without; ``exact``: ``2 n k^2``), and one symmetric eigenvalue problem of the short side per gradient.

    Example:
        >>> model = nn.Linear(8, 4)
        >>> with Probe(model, every=1) as probe:
        ...     model(torch.ones(16, 8)).square().sum().backward()
        ...     rows = probe.step()
        >>> [round(rows[0][key], 6) for key in ("stable_rank", "nuclear_rank")]
        [1.0, 1.0]

    Source: Davis and Drusvyatskiy (arXiv 2512.04299), sections 4 and 5.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 50,
        pattern: str | None = None,
        *,
        exact: bool = False,
        blocks: Mapping[str, Blocks] | None = None,
        spectra_at: Iterable[int] = (),
        shards: int | None = None,
        on_record: OnRecord | None = None,
        group: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` of `Probe` must be a torch.nn.Module; got {type(model).__name__}.")
        for name, value in (("every", every), ("shards", 1 if shards is None else shards)):
            if not (isinstance(value, int) and value >= 1):
                raise ValueError(f"`{name}` of `Probe` must be an integer >= 1; got {value!r}.")
        if isinstance(model, nn.DataParallel):
            raise ValueError("`model` of `Probe` must not be a DataParallel, whose copies no hook reaches; use "
                             "DistributedDataParallel.")  # fmt: skip
        self.model = unwrapped(model)
        self.layers, self.skipped = find_layers(self.model, pattern, blocks)
        self.group = group if group is not None else process_group(model)
        self.every, self.shards, self.on_record = every, shards, on_record
        self.exact = exact or self.group is not None
        self.spectra_at = frozenset(spectra_at)
        self.records: list[dict[str, Any]] = []
        self.advantages: list[dict[str, Any]] = []
        self.gains: list[dict[str, Any]] = []
        self.spectra: list[dict[str, Any]] = []
        #: Measured steps that were left out because a gradient was not finite, as after an overflow of a loss scaler.
        self.overflows = 0
        self._step, self._forced, self._attached, self._paused = 0, False, False, False
        self._handles: list[RemovableHandle] = []
        self._starts: dict[tuple[str, int], Tensor] = {}
        self._eager = EagerCompiled()
        self._gathered = Gathered(self.exact, self._starts)

    def __enter__(self) -> "Probe":
        return self.attach()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()

    def attach(self) -> "Probe":
        """Starts watching; the context manager does it for you."""
        self._attached = True
        self._prepare()
        return self

    def detach(self) -> None:
        """Removes all hooks and drops what an unfinished step has gathered; finished measurements stay."""
        self._attached = False
        self._prepare()

    @property
    def step_index(self) -> int:
        """Index of the step in progress."""
        return self._step

    @property
    def measuring(self) -> bool:
        """Whether the step in progress is measured."""
        return self._step % self.every == 0 or self._forced or self._step in self.spectra_at

    def measure_now(self) -> None:
        """Measures the step in progress too, whatever ``every`` says; call it before the forward pass."""
        if not self.measuring:
            self._forced = True
            self._prepare()

    def resume_at(self, step: int) -> None:
        """Sets the index of the next step, so that a resumed run measures the steps an uninterrupted one would."""
        if step < 0:
            raise ValueError(f"`step` of `Probe.resume_at` must be >= 0; got {step}.")
        self._step = step
        self._prepare()

    def mask(self, positions: Tensor | None) -> None:
        """Positions that count as tokens in the forward passes from now to the end of the step, such as non-padding.

        Args:
            positions: True (or not zero) where a token counts, as attention masks of transformers have it, with the
                leading axes of the layers' inputs; None counts all.

        Raises:
            TypeError: for a floating mask, whose zeros may mean either.
        """
        if positions is not None and positions.is_floating_point():
            raise TypeError(f"`positions` of `Probe.mask` must be boolean, or 0 and 1; got {positions.dtype}.")
        self._gathered.mask = None if positions is None else positions.bool()

    def step(self) -> list[dict[str, Any]]:
        """Ends an optimizer step.

        Returns:
            One record per block of each layer on a measured step, else an empty list: ``step``, ``layer``, ``kind``,
            ``rows``, ``cols``, ``tokens``, ``stable_rank`` (``_error``: relative, ``_side``: exact or above),
            ``nuclear_rank``, ``ratio``, ``verdict``, ``reason`` (why undefined, else empty), ``noise_to_signal``,
            ``outlier_share``, ``core_stable_rank`` of attention outputs, ``participation_ratio``,
            ``gradient_stable_rank``, norms of the gradient, ``frequency_exponent`` of embeddings, ``parameter``. Empty too
            after an overflow, which is counted in ``overflows`` and measured again at the next step.

        Raises:
            RuntimeError: if the probe is not attached, or a measured step had no backward pass.
            ValueError: if the mask given for a measured step fits no layer's input.
        """
        if not self._attached:
            raise RuntimeError("`Probe.step` needs attached hooks; use the probe in a `with` block or call `attach`.")
        measured: list[dict[str, Any]] = []
        again = False
        if self.measuring:
            self._complete()
            if not self._gathered.grads:
                raise RuntimeError(
                    "`Probe.step` found no gradient in a measured step; call it after loss.backward() (fully sharded "
                    "models: before zero_grad)."
                )
            if self._gathered.mask is not None and not self._gathered.mask_fits:
                raise ValueError(
                    "`positions` of `Probe.mask` must have the leading axes of the layers' inputs; shape "
                    f"{tuple(self._gathered.mask.shape)} fits none of this step."
                )
            fired = bool(self._gathered.inputs or self._gathered.counts)
            finite = all(map(_finite, self._gathered.grads.values()))
            again = not finite or (not fired and self._eager.missed())
            self.overflows += not finite
            if not again:
                measured = list(records_of(self.layers, self._gathered, self._step, self.shards))
                self._keep(measured)
        self._step += 1
        self._forced = again
        self._prepare()
        return measured

    def report(self) -> ProbeReport:
        """All measurements so far.

        Raises:
            RuntimeError: if nothing has been measured yet.
        """
        if not (self.records or self.advantages or self.gains):
            lost = f" {self.overflows} measured steps had gradients that are not finite." if self.overflows else ""
            raise RuntimeError(f"`Probe.report` needs at least one measured step; call `step` after a backward pass.{lost}")
        return ProbeReport(
            list(self.records), dict(self.skipped), list(self.advantages), list(self.gains), self.overflows, self.model
        )

    def measure_advantage(
        self, inputs: Any, targets: Tensor, loss: Any = "cross_entropy", **settings: Any
    ) -> list[dict[str, Any]]:
        """Level 2 at the present weights: see `specgrad.probe.measure_advantage`; the result enters the report.

        Call it between steps. It evaluates the model on its own and changes nothing.

        Args:
            inputs: inputs of a batch, sequences along the first axis.
            targets: its targets.
            loss: a loss whose targets can be sampled from the model.
            settings: the others of `specgrad.probe.measure_advantage`.
        """
        with self._aside():
            found = measure_advantage(self.model, inputs, targets, loss, **self._common(), **settings)
        self.advantages += found
        return found

    def measure_gain(
        self, inputs: Any, targets: Tensor, loss: Any = "cross_entropy", **settings: Any
    ) -> list[dict[str, Any]]:
        """Level 3 at the present weights: see `specgrad.probe.measure_gain`; the result enters the report.

        Args:
            inputs: inputs of a batch, sequences along the first axis.
            targets: its targets.
            loss: a loss whose targets can be sampled from the model.
            settings: the others of `specgrad.probe.measure_gain`.
        """
        with self._aside():
            found = measure_gain(self.model, inputs, targets, loss, **self._common(), **settings)
        self.gains += found
        return found

    def _common(self) -> dict[str, Any]:
        return {"step": self._step, "layers": self.layers, "group": self.group}

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Forward passes that belong to no training step."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to measure as an uninterrupted one would: position, results, starts of the estimates."""
        kept = {name: list(getattr(self, name)) for name in _RESULTS}
        return kept | {"step": self._step, "overflows": self.overflows, "starts": dict(self._starts), "forced": self._forced}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state that `state_dict` gave."""
        for name in _RESULTS:
            setattr(self, name, list(state[name]))
        self.overflows, self._forced, self._starts = state["overflows"], state["forced"], dict(state["starts"])
        self.resume_at(state["step"])

    def knows(self, parameter: Tensor) -> bool:
        """Whether a parameter is among those that are measured."""
        return any(layer.weight is parameter for layer in self.layers)

    def evidence(self, parameter: Tensor) -> Evidence | None:
        """What the last measurements say on a parameter, for an optimizer that adapts; None where nothing is known."""
        names = {layer.parameter for layer in self.layers if layer.weight is parameter}
        return Evidence.of(names, self.records, self.advantages) if names else None

    def _prepare(self) -> None:
        """Hooks for the step to come: on a measured one all of them, else none."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        exact = self.exact or self._step in self.spectra_at
        self._gathered = Gathered(exact, self._starts)
        if not (self._attached and self.measuring):
            self._eager.stop()
            return
        self._eager.start()
        hooked: set[int] = set()
        for layer in self.layers:
            for module in layer.modules:
                on_call = _Hook(self._on_call, layer)
                self._handles.append(module.register_forward_pre_hook(on_call, with_kwargs=True))
            if id(layer.weight) not in hooked:
                hooked.add(id(layer.weight))
                hook = _Hook(self._on_grad, layer)
                self._handles.append(layer.weight.register_post_accumulate_grad_hook(hook))

    def _on_call(self, layer: Layer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (torch.compiler.is_compiling() or self._paused):
            self._gathered.on_call(layer, module, args, kwargs)

    def _on_grad(self, layer: Layer, parameter: Tensor) -> None:
        if not torch.compiler.is_compiling():
            self._gathered.on_grad(layer.parameter, parameter)

    def _complete(self) -> None:
        """Gradients that no hook brought (sharded parameters), and the sums over all processes."""
        gathered, group = self._gathered, self.group
        for layer in self.layers:
            if layer.parameter not in gathered.grads and layer.weight.grad is not None:
                gathered.grads[layer.parameter] = layer.weight.grad.detach()
        if group is None:
            return
        grads: dict[str, Tensor] = {}
        for layer in self.layers:
            weight = layer.weight.detach()
            if layer.parameter not in grads:
                whole = reduce_gradient(gathered.grads.get(layer.parameter), weight, group)
                if whole is not None:
                    grads[layer.parameter] = whole
            if layer.kind == "embedding" and isinstance(layer.module, nn.Embedding):
                found = gathered.counts.get(layer.name)
                gathered.counts[layer.name] = reduce_counts(found, layer.module.num_embeddings, group, weight.device)
                continue
            for stream in sorted({block.stream for block in layer.blocks}):
                shape = layer.matrix(weight.to("meta"), layer.blocks[0]).shape
                features = shape[-1] if layer.blocks[0].columns is None else weight.shape[0 if layer.transposed else 1]
                seen = gathered.inputs.get((layer.name, stream))
                gathered.inputs[layer.name, stream] = reduce_inputs(seen, features, group, weight.device)
        gathered.grads = grads

    def _keep(self, measured: list[dict[str, Any]]) -> None:
        self.records += measured
        if self._step in self.spectra_at:
            self.spectra += spectra_of(self.layers, self._gathered, self._step)
        for key, statistics in self._gathered.inputs.items():
            direction = statistics.top_direction()
            if direction is not None:
                self._starts[key] = direction
        if self.on_record is not None:
            self.on_record(self._step, numbers_of(measured))


def numbers_of(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """The finite numbers of records under the names ``layer/quantity``."""
    about = ("step", "rows", "cols")
    return {
        f"{row['layer']}/{key}": value
        for row in measured
        for key, value in row.items()
        if key not in about and isinstance(value, int | float) and math.isfinite(value)
    }


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model inside DistributedDataParallel and ``torch.compile``, under whose names layers are reported."""
    while True:
        inner: Any = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ == "DistributedDataParallel":
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _finite(grad: Tensor) -> bool:
    """Whether a gradient has neither Inf nor NaN, which its sum would show; in float32, beyond which half precision ends."""
    values = grad.coalesce().values() if grad.is_sparse else grad
    wide = values.dtype if values.dtype == torch.float64 else torch.float32
    return bool(values.sum(dtype=wide).isfinite())


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
