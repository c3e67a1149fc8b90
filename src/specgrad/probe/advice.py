"""What a report means for its reader, and what to do next; every line carries threshold and formula."""

import math
from dataclasses import dataclass

from specgrad.probe.condition import FAILS_BELOW
from specgrad.probe.gauss_newton import NO_REGIME
from specgrad.probe.inputs import OUTLIER_SHARE
from specgrad.probe.summary import UNSEEN, LayerSummary


@dataclass(frozen=True)
class CriticalBatch:
    """Batch sizes, in items (tokens), beyond which one step of each method gains nothing: orders of magnitude.

    Attributes:
        sgd: ``d^(1/2)``.
        muon: ``d^(alpha + 1/2)``.
    """

    sgd: float
    muon: float


def critical_batch(alpha: float, width: int) -> CriticalBatch | None:
    """Where larger batches stop helping in a linear associative memory with item frequencies ``p_i ~ i^-alpha``.

    An extrapolation: the theory is of one layer, one step and orthogonal-like random embeddings, up to logarithms and
    constants. It says that the spectral method can use far larger batches, not which batch to take.

    Args:
        alpha: exponent of the token frequencies, such as ``frequency_exponent`` of an embedding's record.
        width: embedding dimension d.

    Returns:
        The two batch sizes; None unless ``alpha`` > 1, where the theory begins.

    Raises:
        ValueError: if ``width`` < 1.

    Example:
        >>> critical_batch(1.5, 64)
        CriticalBatch(sgd=8.0, muon=4096.0)

    Source: the one-step capacity theorems of the associative-memory paper listed in CITATION.cff.
    """
    if width < 1:
        raise ValueError(f"`width` of `critical_batch` must be >= 1; got {width}.")
    if not (math.isfinite(alpha) and alpha > 1):
        return None
    return CriticalBatch(width**0.5, width ** (alpha + 0.5))


def next_steps(layers: list[LayerSummary], overflows: int) -> list[str]:
    """What the measurements suggest doing, most important first."""
    lines = []
    hidden = [layer for layer in layers if layer.kind not in ("embedding", "gain")]
    measured = [layer for layer in hidden if math.isfinite(layer.advantage)]
    # Level 2 decides where it was measured, as in the routing.
    failing = [layer.layer for layer in hidden if layer.verdict == "fails" and layer not in measured]
    if failing:
        lines.append(f"Keep {some(failing)} with AdamW (nr(G)/st(A) < {FAILS_BELOW:g}); `report.param_groups()` does so.")
    unclear = [layer.layer for layer in layers if layer.advantage_reason.startswith(NO_REGIME)]
    if unclear:
        lines.append(
            f"No quadratic model describes the loss yet on {some(unclear)}: predict again some tens of steps later."
        )
    if not any(math.isfinite(layer.advantage) for layer in layers):
        if not unclear:
            lines.append(
                "The condition is a regime check and ranks nothing: before choosing layers, measure the one-step advantage "
                "with `probe.measure_advantage(inputs, targets)`."
            )
    elif not any(math.isfinite(layer.gain) for layer in layers):
        lines.append("Audit the predicted advantages on a few layers with `probe.measure_gain(inputs, targets)`.")
    weak = [layer.layer for layer in measured if layer.advantage < 1]
    if weak:
        lines.append(
            f"A spectral step is predicted to gain less than a Euclidean one (advantage < 1) on {some(weak)}; "
            "`report.param_groups()` leaves them to AdamW."
        )
    elif measured:
        which = f"all {len(measured)} measured matrices outside embeddings" if len(measured) > 1 else measured[0].layer
        lines.append(
            f"A spectral step is predicted to gain more than a Euclidean one (advantage > 1) on {which}: train with "
            "`specgrad.optim.Muon(report.param_groups())`."
        )
    outlying = [layer.layer for layer in layers if layer.outlier_share > OUTLIER_SHARE]
    if outlying:
        lines.append(
            f"One token carries more than {OUTLIER_SHARE:.0%} of the squared input norm of {some(outlying)}: their low "
            "stable rank is that token's, not a common mean's."
        )
    unmeasured = [layer.layer for layer in layers if layer.verdict == "undefined" and layer.reason != UNSEEN]
    if unmeasured:
        lines.append(f"No verdict on {some(unmeasured)}; the reasons are listed.")
    if overflows:
        lines.append(f"{overflows} measured steps were left out because their gradients were not finite.")
    for layer in layers:
        batch = critical_batch(layer.frequency_exponent, layer.cols) if layer.kind == "embedding" else None
        if batch is not None:
            lines.append(
                f"Theory's extrapolation (linear associative memory, one step, up to constants) from the token exponent "
                f"{layer.frequency_exponent:.2f} and width {layer.cols} of {layer.layer}: SGD saturates at batches of about "
                f"d^(1/2) = {batch.sgd:,.0f} tokens, Muon at d^(alpha + 1/2) = {batch.muon:.1e}."
            )
    return lines


def some(names: list[str]) -> str:
    """The first four names and how many more there are."""
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown
