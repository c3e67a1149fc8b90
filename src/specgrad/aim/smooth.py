"""Whether a loss is twice differentiable: the fundamental theorem of calculus, tried along random lines."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from specgrad.aim.losses import FeatureFunction

_LINES, _CELLS, _REACH = 4, 64, 4.0
_BISECTIONS = 24

# Cells that may fail at once: a steep smooth piece fails in a few, noise or a jump everywhere in all.
_MOST_FAILING = 4096

# Share of the largest slope that counts as a jump; bisection leaves only jumps standing, so that it may be small.
_JUMP = 1e-4


def has_kinks(function: FeatureFunction, features: int) -> bool:
    """Whether the function or its gradient jumps somewhere along a few random lines.

    Along a line, ``f`` must change by the integral of its slope and the slope by the integral of its derivative. Cells
    where this fails are bisected: a steep but smooth piece stops failing, a jump does not.

    Raises:
        ValueError: for a function that is not finite there, such as a logarithm of scores.
    """
    generator = np.random.default_rng(0)
    nodes, weights = np.polynomial.legendre.leggauss(5)
    for _ in range(_LINES):
        base = torch.from_numpy(generator.standard_normal(features) * 0.3)
        step = generator.standard_normal(features)
        direction = torch.from_numpy(step / np.linalg.norm(step))
        edges = np.linspace(-_REACH, _REACH, _CELLS + 1)
        left, right = edges[:-1], edges[1:]
        scale = None
        for _ in range(_BISECTIONS):
            ends = np.stack([left, right], axis=1)
            inside = (left + right)[:, None] / 2 + (right - left)[:, None] / 2 * nodes
            value, slope, _ = _along(function, base, direction, ends)
            _, inner_slope, inner_curvature = _along(function, base, direction, inside)
            half = (right - left) / 2
            jump = np.abs(slope[:, 1] - slope[:, 0] - half * (inner_curvature @ weights))
            jump = np.maximum(jump, np.abs(value[:, 1] - value[:, 0] - half * (inner_slope @ weights)))
            if not (np.isfinite(value).all() and np.isfinite(slope).all()):
                raise ValueError(
                    "`loss` of `aim` and its derivatives must be finite for all scores; they are not at scores of order 1."
                )
            scale = np.abs(slope).max() + np.ptp(value) if scale is None else scale
            bad = ~(jump <= _JUMP * scale)
            if not bad.any():
                break
            if bad.sum() > _MOST_FAILING:
                return True
            middle = (left[bad] + right[bad]) / 2
            left, right = np.concatenate([left[bad], middle]), np.concatenate([middle, right[bad]])
        else:
            return True
    return False


def _along(
    function: FeatureFunction,
    base: Float[Tensor, " n"],
    direction: Float[Tensor, " n"],
    at: Float[np.ndarray, "cells points"],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    y = base + torch.from_numpy(at.reshape(-1, 1)) * direction
    value, gradient, hessian = function.derivatives(y)
    curvature = (hessian @ direction) @ direction
    return tuple(part.numpy().reshape(at.shape) for part in (value, gradient @ direction, curvature))  # type: ignore[return-value]
