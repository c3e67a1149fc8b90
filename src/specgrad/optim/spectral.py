"""`SpectralOptimizer`: momentum, weight decay, shape factors and batching around one overridable direction."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from specgrad.optim.blocks import Blocks
from specgrad.optim.checks import UPDATES, check_parameter, check_settings
from specgrad.optim.rules import SCALAR_RULES
from specgrad.optim.scaling import Scale, shape_factor
from specgrad.optim.sharding import Sharding, all_finite, part_of, whole

Nonfinite = Literal["propagate", "skip", "raise"]
MomentumStyle = Literal["ema", "sum"]

# Attributes that copies and pickles keep, beside state and groups.
_KEPT = ("nonfinite", "sharding", "measure_rms", "_defaults_of", "last_step")


@dataclass
class StepReport:
    """What the last step did.

    Attributes:
        updated: number of parameters that each update moved.
        matrices: number of matrices that went through `SpectralOptimizer.direction`.
        without_gradient: parameters that had none and were left alone.
        skipped: names of parameters left out for Inf or NaN in their gradient.
        rms: root mean square of each parameter's spectral step before the learning rate, by name; filled only while the
            optimizer's ``measure_rms`` is True.
    """

    updated: dict[str, int] = field(default_factory=lambda: dict.fromkeys(UPDATES, 0))
    matrices: int = 0
    without_gradient: int = 0
    skipped: list[str] = field(default_factory=list)
    rms: dict[str, float] = field(default_factory=dict)


class SpectralOptimizer(torch.optim.Optimizer):
    """Base of the spectral optimizers: ``W <- (1 - lr decay) W - lr factor(shape) direction(momentum)``.

    Subclasses override `direction` and nothing else. A group's ``update`` says what its parameters get: ``spectral``
    (the direction), ``sign`` (the sign of the momentum, the analogue for norm gains), ``adamw`` or ``sgd``, so that one
    object serves a whole model. A group's ``blocks`` (`Blocks`) declares the matrices inside its parameters. Parameters
    without a gradient are left exactly as they are, ``p.grad`` is never written, the whole state exists before the first
    step, and matrices of equal shape are handled in one batch.

    Args:
        params: parameters, named parameters, or groups such as those of `specgrad.optim.param_groups`.
        lr: learning rate of spectral and sign groups, >= 0; may be a tensor.
        momentum: decay of the running gradient, in [0, 1).
        nesterov: whether the direction looks one step ahead.
        weight_decay: decoupled decay of spectral and sign groups, at the base ``lr``.
        scale: shape factor, see `specgrad.optim.scaling`.
        update_clip: largest root mean square of a parameter's spectral step before the learning rate; None for no limit.
            Clipping gradients does nothing to a direction that ignores scale; clipping the step does.
        momentum_style: ``ema`` averages gradients, ``sum`` adds them up; directions that ignore scale are the same.
        nonfinite: what a gradient with Inf or NaN does: ``propagate`` (as in PyTorch), ``skip`` (that parameter and its
            state stay as they were) or ``raise`` (FloatingPointError before anything is changed).
        adamw_lr: learning rate of AdamW groups that state none.
        adamw_betas: their decay rates.
        adamw_eps: their denominator's offset.
        adamw_weight_decay: their decoupled weight decay.
        sgd_lr: learning rate of sgd groups that state none.
        sharding: what is orthogonalised of a sharded matrix (DTensor): ``gather`` the whole, as a single process would, or
            ``shardwise`` each rank its own part, without communication.

    Raises:
        ValueError: for a setting out of range or a parameter that does not fit its ``blocks``.
        TypeError: for a parameter of complex or integer dtype.
    """

    #: Update of groups that state none.
    default_update = "spectral"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        scale: Scale = "original",
        update_clip: float | None = None,
        momentum_style: MomentumStyle = "ema",
        nonfinite: Nonfinite = "propagate",
        adamw_lr: float | Tensor = 3e-4,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.0,
        sgd_lr: float | Tensor = 0.1,
        sharding: Sharding = "gather",
    ) -> None:
        if sharding not in ("gather", "shardwise"):
            raise ValueError(f"`sharding` must be gather or shardwise; got {sharding!r}.")
        self.sharding = sharding
        if nonfinite not in ("propagate", "skip", "raise"):
            raise ValueError(f"`nonfinite` must be propagate, skip or raise; got {nonfinite!r}.")
        shape_factor(scale, 1, 1)  # refuses an unknown name
        self.nonfinite = nonfinite
        moving = {"momentum": momentum, "nesterov": nesterov, "momentum_style": momentum_style, "weight_decay": weight_decay}
        self._defaults_of: dict[str, dict[str, Any]] = {
            "spectral": moving | {"lr": lr, "scale": scale, "blocks": None, "update_clip": update_clip},
            "sign": moving | {"lr": lr},
            "adamw": {"lr": adamw_lr, "weight_decay": adamw_weight_decay, "betas": adamw_betas, "eps": adamw_eps},
            "sgd": {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "lr": sgd_lr},
        }
        self.last_step = StepReport()
        self.measure_rms = False
        # Copies, so that one list of groups serves several optimizers.
        groups = [dict(entry) if isinstance(entry, dict) else entry for entry in params]
        super().__init__(groups, {"update": self.default_update})
        # Schedulers that cycle the momentum look for it here.
        self.defaults.update(self._defaults_of[self.default_update])

    def direction(self, momentum: Float[Tensor, "batch m n"], group: dict[str, Any]) -> Float[Tensor, "batch m n"]:
        """What is subtracted, before learning rate and shape factor, for a stack of momentum matrices."""
        raise NotImplementedError("abstract: an optimizer defines its direction")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, filling in the defaults of its update and creating the whole state of its parameters."""
        update = param_group.setdefault("update", self.default_update)
        if update not in UPDATES:
            raise ValueError(f"`update` of a parameter group must be one of {', '.join(UPDATES)}; got {update!r}.")
        for key, value in self._defaults_of[update].items():
            param_group.setdefault(key, value)
        if isinstance(param_group.get("blocks"), Blocks):
            # Plain values, so that checkpoints load with weights_only=True.
            param_group["blocks"] = param_group["blocks"].as_dict()
        check_settings(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for name, parameter in self._named(group):
                check_parameter(name, parameter, group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        for parameter in group["params"]:
            self.state[parameter] = initial_state(parameter, update)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, also of ``torch.optim.Muon`` or an earlier version.

        Settings and state that it lacks keep the values of this optimizer.
        """
        present = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, mine in zip(self.param_groups, present, strict=True):
            for key, value in mine.items():
                group.setdefault(key, value)
            for parameter in group["params"]:
                for key, value in initial_state(parameter, group["update"]).items():
                    self.state[parameter].setdefault(key, value)

    def __getstate__(self) -> dict[str, Any]:
        # PyTorch's own keeps only state and groups, so that copies and pickles would lose the rest.
        mine = {k: v for k, v in self.__dict__.items() if k in _KEPT}
        return super().__getstate__() | mine

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient; `last_step` tells what was done.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The closure's loss, if one was given.

        Raises:
            FloatingPointError: with ``nonfinite="raise"``, if a gradient has Inf or NaN.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.last_step = StepReport()
        ready = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        self._refuse_sparse(ready)
        self.last_step.without_gradient = sum(
            len(g["params"]) - len(r) for g, r in zip(self.param_groups, ready, strict=True)
        )
        if self.nonfinite != "propagate":
            ready = self._finite_only(ready)
        for group, parameters in zip(self.param_groups, ready, strict=True):
            if not parameters:
                continue
            grads, states = [_grad(p) for p in parameters], [self.state[p] for p in parameters]
            if group["update"] in SCALAR_RULES:
                SCALAR_RULES[group["update"]][1](parameters, grads, states, group)
            else:
                ahead = _running([state["momentum_buffer"] for state in states], grads, group)
                torch._foreach_mul_(parameters, 1 - float(group["lr"]) * group["weight_decay"])
                if group["update"] == "sign":
                    torch._foreach_add_(parameters, [u.sign() for u in ahead], alpha=-float(group["lr"]))
                else:
                    self._subtract_directions(parameters, ahead, group)
            self.last_step.updated[group["update"]] += len(parameters)
        return loss

    def _subtract_directions(self, parameters: list[Tensor], ahead: list[Tensor], group: dict[str, Any]) -> None:
        if group["blocks"]:
            self._subtract_block_directions(parameters, ahead, group, Blocks(**group["blocks"]))
            return
        stacks: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
        for parameter, u in zip(parameters, ahead, strict=True):
            matrix = whole(u, self.sharding)
            members, sources = stacks.setdefault((u.shape, matrix.shape, u.dtype, u.device), ([], []))
            members.append(parameter)
            sources.append(matrix)
        for (shape, _, _, _), (members, sources) in stacks.items():
            factor = shape_factor(group["scale"], *shape)
            directions = self.direction(torch.stack(sources), group)
            if group["update_clip"] is not None:
                directions = torch.stack([_clipped(d, group["update_clip"] / factor) for d in directions])
            self.last_step.matrices += len(members)
            self._measure(members, [d * factor for d in directions] if self.measure_rms else [], group)
            step = float(group["lr"]) * factor
            parts = [part_of(d, p, self.sharding) for d, p in zip(directions.unbind(0), members, strict=True)]
            torch._foreach_add_(members, parts, alpha=-step)

    def _subtract_block_directions(
        self, parameters: list[Tensor], ahead: list[Tensor], group: dict[str, Any], blocks: Blocks
    ) -> None:
        # Blocks of equal shape, from whichever parameter, go through the direction as one stack.
        pairs: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = {}
        ahead = [whole(u, self.sharding) for u in ahead]
        # In float32 at least: a direction may be longer than half precision reaches before the learning rate.
        working = [torch.promote_types(u.dtype, torch.float32) for u in ahead]
        steps = [
            torch.empty_like(u, dtype=d, memory_format=torch.contiguous_format) for u, d in zip(ahead, working, strict=True)
        ]
        for u, step in zip(ahead, steps, strict=True):
            for source, target in zip(blocks.views(u.contiguous()), blocks.views(step), strict=True):
                pairs.setdefault((source.shape[-2:], source.dtype, source.device), []).append((source, target))
        for stack in pairs.values():
            directions = self.direction(torch.cat([source for source, _ in stack]), group)
            self.last_step.matrices += len(directions)
            factor = shape_factor(group["scale"], *blocks.outputs_and_inputs(stack[0][0]))
            parts = directions.split([len(source) for source, _ in stack])
            for (_, target), part in zip(stack, parts, strict=True):
                torch.mul(part.to(target.dtype), factor, out=target)
        if group["update_clip"] is not None:
            steps = [_clipped(step, group["update_clip"]) for step in steps]
        self._measure(parameters, steps if self.measure_rms else [], group)
        parts = [part_of(step, p, self.sharding) for step, p in zip(steps, parameters, strict=True)]
        torch._foreach_add_(parameters, parts, alpha=-float(group["lr"]))

    def _measure(self, parameters: list[Tensor], steps: list[Tensor], group: dict[str, Any]) -> None:
        names = {id(p): name for name, p in self._named(group)} if steps else {}
        for parameter, step in zip(parameters, steps, strict=False):
            self.last_step.rms[names[id(parameter)]] = float(step.float().square().mean().sqrt())

    def _refuse_sparse(self, ready: list[list[Tensor]]) -> None:
        sparse = {id(p) for parameters in ready for p in parameters if _grad(p).layout != torch.strided}
        for group in self.param_groups if sparse else ():
            for name, parameter in self._named(group):
                if id(parameter) in sparse:
                    raise TypeError(
                        f"Parameter {name} must have a dense gradient; got layout {_grad(parameter).layout}. "
                        "Build its embedding with sparse=False, or give it to torch.optim.SparseAdam."
                    )

    def _finite_only(self, ready: list[list[Tensor]]) -> list[list[Tensor]]:
        flat = [p for parameters in ready for p in parameters]
        if not flat:
            return ready
        finite = torch.stack([all_finite(_grad(p)) for p in flat]).tolist()
        bad = {id(p) for p, ok in zip(flat, finite, strict=True) if not ok}
        names = [name for group in self.param_groups for name, p in self._named(group) if id(p) in bad]
        if bad and self.nonfinite == "raise":
            raise FloatingPointError(
                f"{len(bad)} of {len(flat)} gradients contain Inf or NaN ({', '.join(names[:5])}); no parameter was "
                'changed. Use nonfinite="skip" to leave such parameters out of the step.'
            )
        self.last_step.skipped = names
        return [[p for p in parameters if id(p) not in bad] for parameters in ready]

    def _named(self, group: dict[str, Any]) -> list[tuple[str, Tensor]]:
        names = group.get("param_names") or [f"number {i}" for i in range(len(group["params"]))]
        return list(zip(names, group["params"], strict=True))


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _clipped(step: Tensor, limit: float) -> Tensor:
    """The step, shortened to a root mean square of ``limit`` where it is longer."""
    rms = torch.linalg.vector_norm(step.float()) / step.numel() ** 0.5
    shortened: Tensor = step * (limit / rms.clamp(min=limit)).to(step.dtype)
    return shortened


def initial_state(parameter: Tensor, update: str) -> dict[str, Tensor]:
    """The whole state of a parameter before its first step."""
    if update in SCALAR_RULES:
        return SCALAR_RULES[update][0](parameter)
    return {"momentum_buffer": torch.zeros_like(parameter)}


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameters, named parameters or groups as a list of groups."""
    entries = list(params)
    return [dict(e) for e in entries] if entries and isinstance(entries[0], dict) else [{"params": entries}]


def _running(buffers: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Updates the momentum buffers; returns the momentum, or with Nesterov its look-ahead in fresh tensors."""
    decay = group["momentum"]
    grads = [g.to(b.dtype) for g, b in zip(grads, buffers, strict=True)]
    if group["momentum_style"] == "ema":
        torch._foreach_lerp_(buffers, grads, 1 - decay)
        return list(torch._foreach_lerp(grads, buffers, decay)) if group["nesterov"] else buffers
    torch._foreach_mul_(buffers, decay)
    torch._foreach_add_(buffers, grads)
    return list(torch._foreach_add(grads, buffers, alpha=decay)) if group["nesterov"] else buffers
