"""`Check`: one number against its expectation."""

import math
from dataclasses import dataclass

from specgrad.stats.power_law import PowerLaw


@dataclass(frozen=True)
class Check:
    """One numeric test of a figure's claim.

    Attributes:
        name: what is compared.
        expected: the expectation, in words and numbers.
        tolerance: how far off still passes, in words and numbers.
        got: what came out.
        passed: whether the expectation is met.
    """

    name: str
    expected: str
    tolerance: str
    got: str
    passed: bool

    def __str__(self) -> str:
        outcome = "PASS" if self.passed else "FAIL"
        return f"{outcome}  {self.name}: expected {self.expected} (tolerance {self.tolerance}), got {self.got}"


def exponent_check(name: str, fit: PowerLaw, predicted: float | int, tolerance: float | int) -> Check:
    """A fitted exponent against a predicted one.

    It passes where the prediction is within ``tolerance`` of the confidence interval, and the interval is no wider than
    ``4 tolerance``: a fit that is too uncertain to contradict anything does not pass. Without an interval (one seed) the
    exponent itself is compared.

    Args:
        name: what was fitted.
        fit: the fit.
        predicted: exponent of the theory.
        tolerance: systematic distance, such as a finite-size correction, that still passes.
    """
    low, high = (fit.exponent, fit.exponent) if math.isnan(fit.low) else (fit.low, fit.high)
    near = low - tolerance <= predicted <= high + tolerance
    sure = high - low <= 4 * tolerance
    local = f"; local slopes {', '.join(f'{slope:.2f}' for slope in fit.local)}" if len(fit.local) > 1 else ""
    return Check(
        name=name,
        expected=f"{predicted:.3g}",
        tolerance=f"{tolerance:.2g} beyond the interval",
        got=f"{fit}{'' if sure else ', too wide'}{local}",
        passed=near and sure,
    )
