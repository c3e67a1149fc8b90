"""The layerwise condition: nuclear rank of the gradient against stable rank of the inputs."""

import math
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["holds", "marginal", "fails", "undefined"]

# The condition compares two guarantees, not two decreases. Where the realised one-step decrease was measured against it,
# the two disagreed only for ratios between 0.8 and 2.1, so a verdict is given outside [0.5, 2] and "marginal" inside.
HOLDS_FROM = 2.0
FAILS_BELOW = 0.5


@dataclass(frozen=True)
class Condition:
    """Outcome of the comparison for one layer.

    Attributes:
        ratio: nuclear rank over stable rank; NaN where one is undefined.
        verdict: ``holds`` from 2, ``fails`` below 0.5, ``marginal`` between, ``undefined`` without a ratio.
        margin: factor by which the ratio could shrink or grow before the verdict changed; NaN if undefined.
    """

    ratio: float
    verdict: Verdict
    margin: float


def condition(nuclear_rank: float, stable_rank: float) -> Condition:
    """Whether a spectral step has the better guarantee: ``nuclear_rank(gradient) >= stable_rank(inputs)``.

    A check of the regime (spiked inputs, spread-out gradients). It compares SpecGD with plain gradient descent through
    upper bounds on curvature: the ratio is no speed-up and does not rank the layers of a network.

    Args:
        nuclear_rank: of the gradient of the layer's weight.
        stable_rank: of the layer's inputs, measured on the same tokens.

    Returns:
        Ratio, verdict and margin.

    Example:
        >>> condition(nuclear_rank=42.0, stable_rank=5.25).verdict
        'holds'

    Source: Davis and Drusvyatskiy (arXiv 2512.04299), the condition of sections 1.2 and 4.
    """
    ratio = nuclear_rank / stable_rank if stable_rank else math.nan
    if not math.isfinite(ratio):
        return Condition(math.nan, "undefined", math.nan)
    if ratio >= HOLDS_FROM:
        return Condition(ratio, "holds", ratio / HOLDS_FROM)
    if ratio < FAILS_BELOW:
        return Condition(ratio, "fails", FAILS_BELOW / ratio)
    return Condition(ratio, "marginal", min(HOLDS_FROM / ratio, ratio / FAILS_BELOW))
