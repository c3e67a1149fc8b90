"""Exact Gauss-Newton curvature along chosen directions, and one step to see whether the quadratic model holds."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from specgrad.probe.directions import Target, block_records, only
from specgrad.probe.layers import Block
from specgrad.probe.objective import Objective

# Realised over predicted decrease at the predicted best step: outside, the quadratic model does not describe the loss.
RHO_LEAST, RHO_MOST = 0.5, 1.5
NO_REGIME = "no quadratic regime yet"

# Length of the difference step over the weight's norm, where forward mode is not to be had: its truncation error is its
# square, its rounding error the working precision over it.
_DIFFERENCE = 1e-3


def gauss_newton_records(target: Target, objective: Objective, step: int) -> Iterator[dict[str, Any]]:
    """Advantages of a target's blocks with exact curvature, corrected by the loss at the predicted best steps.

    With q the Gauss-Newton form and ``rho`` the realised over the predicted decrease at ``a = <G, D> / q``, the parabola
    through the loss, its slope and the loss at the step has the curvature ``q (2 - rho)``. Blocks with rho outside
    [0.5, 1.5] in a direction have no quadratic regime yet, and get that as the reason instead of a number.
    """
    for block, slopes, about in block_records(target, step):
        none = dict.fromkeys(("decrease_euclidean", "decrease_spectral", "step_euclidean", "step_spectral"), math.nan)
        rhos, decreases, steps, method = [math.nan] * 2, [math.nan] * 2, [math.nan] * 2, "gauss_newton"
        for side, whole in enumerate((target.euclidean, target.spectral) if not about["reason"] else ()):
            direction = only(target.layer, whole, block)
            q, method = curvature_along(target, direction, objective)
            if not q > 0:
                about["reason"] = "its curvature is zero"
                break
            steps[side] = slopes[side] / q
            here = objective.value()
            with moved(target, block, whole, steps[side]):
                there = objective.value()
            rhos[side] = (here - there) / (slopes[side] * steps[side] / 2)
            secant = q * (2 - rhos[side])
            decreases[side] = slopes[side] ** 2 / (2 * secant) if secant > 0 else math.nan
        if not about["reason"] and not all(RHO_LEAST <= rho <= RHO_MOST for rho in rhos):
            about["reason"] = (
                f"{NO_REGIME}: realised over predicted decrease {rhos[0]:.2f} along -G and {rhos[1]:.2f} along "
                f"-polar(G), outside [{RHO_LEAST}, {RHO_MOST}]"
            )
        advantage = decreases[1] / decreases[0] if not about["reason"] else math.nan
        values = dict(zip(none, (*decreases, *steps), strict=True))
        yield (
            about | {"advantage": advantage, "log_error": 0.0 if not about["reason"] else math.nan} | values
            | {"method": method, "sequences": objective.sequences, "draws": 0}
            | {"rho_euclidean": round(rhos[0], 12), "rho_spectral": round(rhos[1], 12)}
        )  # fmt: skip


def curvature_along(target: Target, direction: Tensor, objective: Objective) -> tuple[float, str]:
    """Gauss-Newton form along a direction of a weight, and how it was computed.

    Forward mode where the model's kernels have it, else central differences of the outputs.

    Raises:
        ValueError: for a likelihood that can only be sampled.
    """
    curvature = objective.likelihood.curvature
    if curvature is None:
        raise ValueError(
            f"`loss` must know its curvature for method gauss_newton; {objective.likelihood.name} can only be sampled."
        )
    total, method = 0.0, "gauss_newton"
    for part in objective.parts():
        try:
            outputs, z = _forward_mode(target, direction, objective, part)
        except (NotImplementedError, RuntimeError):
            outputs, z = _differences(target, direction, objective, part)
            method = "gauss_newton, differences"
        total += float(curvature(outputs, objective.targets[part], z))
    return float(objective.summed(torch.tensor([total], dtype=torch.float64))) / target.units, method


def _forward_mode(target: Target, direction: Tensor, objective: Objective, part: slice) -> tuple[Tensor, Tensor]:
    weight = target.layer.weight.detach()
    owners = [
        (module, leaf)
        for module in objective.model.modules()
        for leaf, p in module._parameters.items()
        if p is target.layer.weight
    ]
    parameter: Any = target.layer.weight
    # Fused attention kernels have no forward mode.
    with sdpa_kernel(SDPBackend.MATH), forward_ad.dual_level():
        dual = forward_ad.make_dual(weight, direction.to(weight.dtype))
        try:
            for module, leaf in owners:
                del module._parameters[leaf]
                object.__setattr__(module, leaf, dual)
            outputs, z = forward_ad.unpack_dual(objective.outputs(part))
        finally:
            for module, leaf in owners:
                module.__dict__.pop(leaf, None)
                module._parameters[leaf] = parameter
        if z is None:
            raise RuntimeError("no tangent reached the outputs")
        return outputs.detach(), z.detach()


@torch.no_grad()
def _differences(target: Target, direction: Tensor, objective: Objective, part: slice) -> tuple[Tensor, Tensor]:
    length = float(direction.norm())
    h = _DIFFERENCE * float(target.layer.weight.norm()) / length if length > 0 else 1.0
    sides = []
    for sign in (h, -h):
        with _at(target.layer.weight, target.layer.weight + sign * direction.to(target.layer.weight.dtype)):
            sides.append(objective.outputs(part).double())
    return objective.outputs(part), (sides[0] - sides[1]) / (2 * h)


@contextmanager
def _at(weight: Tensor, value: Tensor) -> Iterator[None]:
    before = weight.detach().clone()
    try:
        weight.data.copy_(value)
        yield
    finally:
        weight.data.copy_(before)


@contextmanager
def moved(target: Target, block: Block, whole: Tensor, alpha: float) -> Iterator[None]:
    """The model with one block moved by ``-alpha D``; restored bit for bit."""
    weight = target.layer.weight
    value = weight.detach().clone()
    place = value[block.index] if block.index else value
    place.sub_((whole[block.index] if block.index else whole).to(weight.dtype), alpha=alpha)
    with _at(weight, value):
        yield
