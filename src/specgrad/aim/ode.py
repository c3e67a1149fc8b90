"""Integrating in time, with an end where the numbers stop making sense instead of an overflow."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float
from scipy.integrate import solve_ivp

Vector = Float[np.ndarray, " n"]


# Right-hand sides until an integration counts as stuck; long ones take a few thousand.
_MOST_EVALUATIONS = 100_000


class LeftDomain(Exception):
    """The right-hand side was asked at a state where it is not defined."""


def are_times(times: np.ndarray) -> bool:
    """Whether an array lists times: at least one, finite, >= 0 and ascending."""
    listed = times.ndim == 1 and len(times) > 0 and bool(np.isfinite(times).all())
    return listed and bool(times[0] >= 0 and (np.diff(times) > 0).all())


def integrate(
    rhs: Callable[[float, Vector], Vector],
    start: Vector,
    times: Float[np.ndarray, " times"],
    *,
    rtol: float = 1e-8,
    atol: float = 1e-12,
    method: str = "DOP853",
    limit: float = 1e8,
) -> Float[np.ndarray, "times n"]:
    """States at ``times`` (ascending, from 0 on); NaN from where the state leaves the domain or exceeds ``limit``.

    Args:
        rhs: the derivative; may raise `LeftDomain` or return non-finite values to end the integration.
        start: the state at time 0.
        times: where the state is wanted.
        rtol: relative tolerance.
        atol: absolute tolerance.
        method: of ``scipy.integrate.solve_ivp``.
        limit: largest norm of the state.

    Raises:
        ValueError: if steps become so short that the end is not in reach.
    """

    def too_large(_: float, y: Vector) -> float:
        return limit - float(np.abs(y).max())

    too_large.terminal = True  # type: ignore[attr-defined]
    states = np.full((len(times), len(start)), np.nan)
    states[times == 0] = start
    later = times[times > 0]
    if len(later):
        found = _later_states(rhs, start, later, rtol, atol, method, too_large)
        first = len(times) - len(later)
        states[first : first + len(found)] = found
    return states


def _later_states(
    rhs: Callable[[float, Vector], Vector],
    start: Vector,
    times: Float[np.ndarray, " times"],
    rtol: float,
    atol: float,
    method: str,
    event: Callable[[float, Vector], float],
) -> Float[np.ndarray, "found n"]:
    """States up to the first time that cannot be reached."""
    explicit = method != "LSODA"
    evaluations = 0

    def watched(t: float, y: Vector) -> Vector:
        nonlocal evaluations
        evaluations += 1
        if evaluations > _MOST_EVALUATIONS:
            raise ValueError(
                f"`t_eval` must end earlier than t = {times[-1]:.4g} at rtol {rtol:g}: after {_MOST_EVALUATIONS} "
                f"evaluations the integration has come to t = {t:.4g} of this stretch."
            )
        try:
            value = rhs(t, y)
        except LeftDomain:
            # An explicit method rejects a step with NaN in it and tries a shorter one; LSODA would not.
            if not explicit:
                raise
            return np.full_like(y, np.nan)
        if not explicit and not np.isfinite(value).all():
            raise LeftDomain
        return value

    # Without a derivative at the start, step sizes would shrink for ever.
    try:
        if not np.isfinite(watched(0.0, start)).all():
            return np.empty((0, len(start)))
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            out = solve_ivp(
                watched, (0.0, float(times[-1])), start, method=method, t_eval=times, rtol=rtol, atol=atol, events=event
            )  # fmt: skip
    except LeftDomain:
        return np.empty((0, len(start)))
    return np.asarray(out.y).T if len(out.t) else np.empty((0, len(start)))
