"""`SpectralOptimizer`: momentum, weight decay, shape factors and batching around one overridable direction."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from specgrad.optim.adamw import adamw_step, init_adamw_state
from specgrad.optim.groups import UPDATES
from specgrad.optim.scaling import Scale, shape_factor

Nonfinite = Literal["propagate", "skip", "raise"]


class SpectralOptimizer(torch.optim.Optimizer):
    """Base of the spectral optimizers: ``W <- (1 - lr decay) W - lr factor(shape) direction(momentum)``.

    Subclasses override `direction` and nothing else. A group's ``update`` entry says what its parameters get:
    ``spectral`` (the default) or ``adamw``, so that one optimizer object serves a whole model. Parameters without a
    gradient are left exactly as they are, ``p.grad`` is never written, and matrices of equal shape are handled in one
    batch.

    Args:
        params: parameters, named parameters, or groups such as those of `specgrad.optim.param_groups`.
        lr: learning rate of spectral groups, > 0 or 0; may be a tensor.
        momentum: decay of the exponential average of gradients, in [0, 1).
        nesterov: whether the direction looks one step ahead.
        weight_decay: decoupled decay of spectral groups, applied at the base ``lr``.
        scale: shape factor, see `specgrad.optim.scaling`.
        nonfinite: what a gradient with Inf or NaN does: ``propagate`` (as in PyTorch), ``skip`` (that parameter and its
            state stay as they were) or ``raise`` (FloatingPointError before anything is changed).
        adamw_lr: learning rate of AdamW groups that state none.
        adamw_betas: their decay rates.
        adamw_eps: their denominator's offset.
        adamw_weight_decay: their decoupled weight decay.

    Raises:
        ValueError: for a setting out of range or a spectral parameter that is not a matrix.
        TypeError: for a spectral parameter of complex or integer dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        scale: Scale = "original",
        nonfinite: Nonfinite = "propagate",
        adamw_lr: float | Tensor = 3e-4,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 0.0,
    ) -> None:
        if nonfinite not in ("propagate", "skip", "raise"):
            raise ValueError(f"`nonfinite` must be propagate, skip or raise; got {nonfinite!r}.")
        self.nonfinite = nonfinite
        self._defaults_of: dict[str, dict[str, Any]] = {
            "spectral": {
                "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "scale": scale
            },
            "adamw": {
                "lr": adamw_lr, "weight_decay": adamw_weight_decay, "betas": adamw_betas, "eps": adamw_eps
            },
        }  # fmt: skip
        super().__init__(params, {"update": "spectral"})

    def direction(self, momentum: Float[Tensor, "batch m n"], group: dict[str, Any]) -> Float[Tensor, "batch m n"]:
        """What is subtracted, before learning rate and shape factor, for a stack of momentum matrices."""
        raise NotImplementedError("abstract: an optimizer defines its direction")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, filling in the defaults of its update and creating the whole state of its parameters."""
        update = param_group.setdefault("update", "spectral")
        if update not in UPDATES:
            raise ValueError(f"`update` of a parameter group must be one of {', '.join(UPDATES)}; got {update!r}.")
        for key, value in self._defaults_of[update].items():
            param_group.setdefault(key, value)
        _check_settings(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        names = group.get("param_names", [f"number {i}" for i in range(len(group["params"]))])
        for name, parameter in zip(names, group["params"], strict=True):
            if update == "adamw":
                self.state[parameter] = init_adamw_state(parameter)
            else:
                _check_matrix(name, parameter)
                self.state[parameter] = {"momentum": torch.zeros_like(parameter)}

    def __getstate__(self) -> dict[str, Any]:
        # PyTorch's own keeps only state and groups, so that copies and pickles would lose the rest.
        return super().__getstate__() | {"nonfinite": self.nonfinite, "_defaults_of": self._defaults_of}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient.

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
        ready = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        if self.nonfinite != "propagate":
            ready = self._finite_only(ready)
        for group, parameters in zip(self.param_groups, ready, strict=True):
            if group["update"] == "spectral":
                self._spectral_step(parameters, group)
            elif parameters:
                adamw_step(parameters, [_grad(p) for p in parameters], [self.state[p] for p in parameters], group)
        return loss

    def _finite_only(self, ready: list[list[Tensor]]) -> list[list[Tensor]]:
        flat = [p for parameters in ready for p in parameters]
        if not flat:
            return ready
        finite = torch.stack([torch.isfinite(_grad(p)).all().cpu() for p in flat]).tolist()
        bad = {id(p) for p, ok in zip(flat, finite, strict=True) if not ok}
        if bad and self.nonfinite == "raise":
            raise FloatingPointError(
                f"{len(bad)} of {len(flat)} gradients contain Inf or NaN; no parameter was changed. "
                'Use nonfinite="skip" to leave such parameters out of the step.'
            )
        return [[p for p in parameters if id(p) not in bad] for parameters in ready]

    def _spectral_step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        stacks: dict[tuple[Any, ...], list[Tensor]] = {}
        for parameter in parameters:
            stacks.setdefault((parameter.shape, parameter.dtype, parameter.device), []).append(parameter)
        for (shape, _, _), members in stacks.items():
            step = group["lr"] * shape_factor(group["scale"], *shape)
            directions = self.direction(torch.stack([self._momentum(p, group) for p in members]), group)
            for parameter, direction in zip(members, directions.unbind(0), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(direction * step)

    def _momentum(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        average: Tensor = self.state[parameter]["momentum"]
        grad = _grad(parameter).to(average.dtype)
        average.lerp_(grad, 1 - group["momentum"])
        return grad.lerp(average, group["momentum"]) if group["nesterov"] else average


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _check_settings(group: dict[str, Any]) -> None:
    for key in ("lr", "weight_decay"):
        if not (float(group[key]) >= 0 and math.isfinite(float(group[key]))):
            raise ValueError(f"`{key}` of a {group['update']} group must be finite and >= 0; got {group[key]}.")
    if group["update"] == "spectral":
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"`momentum` must lie in [0, 1); got {group['momentum']}.")
        shape_factor(group["scale"], 1, 1)
    elif not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"`betas` of an adamw group must lie in [0, 1); got {group['betas']}.")


def _check_matrix(name: str, parameter: Tensor) -> None:
    way_out = 'Give it to a group with update="adamw", or let `specgrad.optim.param_groups(model)` decide.'
    if not parameter.dtype.is_floating_point:
        raise TypeError(f"Parameter {name} must be of a real floating dtype for a spectral update; got {parameter.dtype}.")
    if parameter.ndim != 2:
        raise ValueError(
            f"Parameter {name} must be a matrix for a spectral update; got shape {tuple(parameter.shape)}. {way_out}"
        )
