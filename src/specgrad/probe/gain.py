"""Level 3: the realised advantage, by an exact line search along -G and along -polar(G) on one block at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from specgrad.probe.directions import Target, block_records, chosen_layers, find_targets
from specgrad.probe.gauss_newton import moved
from specgrad.probe.layers import Block, Layer, find_layers
from specgrad.probe.likelihoods import likelihood_of
from specgrad.probe.objective import Forward, Objective, default_forward, untouched

# A ray whose loss still falls at this many times the first step is taken to have no minimum.
_MOST_DOUBLINGS = 12
_REFINEMENTS = 5


@dataclass(frozen=True)
class LineMinimum:
    """Best point of a ray.

    Attributes:
        alpha: step.
        decrease: loss at zero minus loss there.
        evaluations: losses computed.
        bracketed: whether a minimum was enclosed.
    """

    alpha: float
    decrease: float
    evaluations: int
    bracketed: bool


def line_minimum(loss: Callable[[float], float], at_zero: float, first: float) -> LineMinimum:
    """Minimum along a ray: powers of two of a first step until it is enclosed, then parabolas in the log of the step.

    Example:
        >>> found = line_minimum(lambda a: (a - 3.0) ** 2, 9.0, 1.0)
        >>> round(found.alpha, 1), round(found.decrease, 1)
        (3.0, 9.0)
    """
    seen: dict[float, float] = {}

    def value(alpha: float) -> float:
        if alpha not in seen:
            found = loss(alpha)
            seen[alpha] = found if math.isfinite(found) else math.inf
        return seen[alpha]

    best = first
    for _ in range(_MOST_DOUBLINGS):
        if value(2 * best) < value(best):
            best = 2 * best
        elif value(best / 2) < value(best) or value(best) >= at_zero:
            best = best / 2
        else:
            break
    bracketed = value(best) <= min(value(best / 2), value(2 * best)) and value(best) < at_zero
    low, high = best / 2, 2 * best
    for _ in range(_REFINEMENTS if bracketed else 0):
        x = [math.log(a) for a in (low, best, high)]
        f = [value(a) for a in (low, best, high)]
        if not all(map(math.isfinite, f)):
            high = math.sqrt(best * high)
            continue
        left, right = (x[1] - x[0]) * (f[1] - f[2]), (x[1] - x[2]) * (f[1] - f[0])
        if left == right:
            break
        new = math.exp(x[1] - 0.5 * ((x[1] - x[0]) * left - (x[1] - x[2]) * right) / (left - right))
        if not low < new < high:
            break
        if abs(math.log(new / best)) < 3e-3:
            # The parabola agrees with the best point so far; a narrower one says whether the loss does.
            low, high = math.sqrt(low * best), math.sqrt(best * high)
            continue
        if value(new) < value(best):
            low, best, high = (best, new, high) if new > best else (low, new, best)
        else:
            low, high = (low, new) if new > best else (new, high)
    alpha = min(seen, key=lambda a: seen[a])
    return LineMinimum(alpha, at_zero - seen[alpha], len(seen), bracketed)


def measure_gain(
    model: nn.Module,
    inputs: Any,
    targets: Tensor,
    loss: Any = "cross_entropy",
    *,
    forward: Forward | None = None,
    pattern: str | None = None,
    chunk: int = 16,
    gains: bool = False,
    step: int = 0,
    layers: list[Layer] | None = None,
    group: Any = None,
) -> list[dict[str, Any]]:
    """Realised one-step advantage of a spectral over a Euclidean step, block by block, on the batch that gives G.

    ``R = [L(W) - min_a L(W - a polar(G))] / [L(W) - min_a L(W - a G)]`` with all other weights frozen: what level 2
    predicts. Eval mode; weights are restored bit for bit.

    Args:
        model: the model.
        inputs: as in `specgrad.probe.measure_advantage`.
        targets: likewise.
        loss: likewise.
        forward: likewise.
        pattern: measure only layers whose name contains this regular expression.
        chunk: sequences per forward pass.
        gains: include norm gains.
        step: recorded with the result.
        layers: default: all of the model.
        group: as there.

    Returns:
        One record per block: ``layer``, ``gain`` (R), ``decrease_euclidean``, ``decrease_spectral``, ``step_euclidean``,
        ``step_spectral``, ``evaluations`` and ``reason``: why there is no value, else empty.

    Raises:
        ValueError: as `specgrad.probe.measure_advantage`.

    Cost: about 20 forward passes per block.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.zero_()
        >>> (record,) = measure_gain(model, torch.eye(2), torch.eye(2), "mse")
        >>> round(record["gain"], 4)
        1.0

    Source: ours.
    """
    objective = Objective(model, inputs, targets, likelihood_of(loss), forward or default_forward, chunk, group)
    layers = find_layers(model)[0] if layers is None else layers
    records = []
    with untouched(model):
        chosen = find_targets(chosen_layers(layers, pattern, gains), objective)
        here = objective.value()
        for target in chosen:
            for block, slopes, about in block_records(target, step):
                found = [math.nan] * 4
                evaluations = 0
                for side in (0, 1) if not about["reason"] else ():
                    ray = _ray(target, block, side, objective)
                    # Where the linear model halves the loss: no curvature is needed to begin.
                    best = line_minimum(ray, here, (abs(here) or 1.0) / (2 * slopes[side]) / 8)
                    evaluations += best.evaluations
                    found[side], found[2 + side] = best.decrease, best.alpha
                    if not (best.bracketed or about["reason"]):
                        what = "has no minimum along {} up to" if best.decrease > 0 else "does not fall along {} from"
                        about["reason"] = f"the loss {what.format('-polar(G)' if side else '-G')} a step of {best.alpha:.1e}"
                gain = found[1] / found[0] if not about["reason"] else math.nan
                records.append(
                    about | {"gain": gain, "decrease_euclidean": found[0], "decrease_spectral": found[1]}
                    | {"step_euclidean": found[2], "step_spectral": found[3], "evaluations": evaluations}
                )  # fmt: skip
    return records


def _ray(target: Target, block: Block, side: int, objective: Objective) -> Callable[[float], float]:
    whole = (target.euclidean, target.spectral)[side]

    def loss(alpha: float) -> float:
        with moved(target, block, whole, alpha):
            return objective.value()

    return loss
