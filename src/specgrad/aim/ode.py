"""Integrating in time, with an end where the numbers stop making sense instead of an overflow."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float
from scipy.integrate import solve_ivp

Vector = Float[np.ndarray, " n"]


class LeftDomain(Exception):
    """The right-hand side was asked at a state where it is not defined."""


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
    """

    def too_large(_: float, y: Vector) -> float:
        return limit - float(np.abs(y).max())

    too_large.terminal = True  # type: ignore[attr-defined]
    states = np.full((len(times), len(start)), np.nan)
    reached, y = 0.0, start
    states[times == 0] = start
    for place in range(len(times)):
        if times[place] <= reached:
            continue
        # One call up to the end; only if it breaks off are the remaining times left NaN.
        pending = times[place:]
        found, complete = _piece(rhs, y, reached, pending, rtol, atol, method, too_large)
        states[place : place + len(found)] = found
        if not complete:
            break
        reached = float(pending[-1])
    return states


def _piece(
    rhs: Callable[[float, Vector], Vector],
    start: Vector,
    begin: float,
    times: Float[np.ndarray, " times"],
    rtol: float,
    atol: float,
    method: str,
    event: Callable[[float, Vector], float],
) -> tuple[Float[np.ndarray, "found n"], bool]:
    passed: list[float] = [begin]

    def watched(t: float, y: Vector) -> Vector:
        value = rhs(t, y)
        if not np.isfinite(value).all():
            raise LeftDomain
        passed.append(t)
        return value

    def run(until: float, wanted: Float[np.ndarray, " wanted"]) -> Float[np.ndarray, "found n"]:
        with np.errstate(over="ignore", invalid="ignore"):
            out = solve_ivp(
                watched, (begin, until), start, method=method, t_eval=wanted, rtol=rtol, atol=atol, events=event
            )  # fmt: skip
        return np.asarray(out.y).T if len(out.t) else np.empty((0, len(start)))

    try:
        found = run(float(times[-1]), times)
        return found, len(found) == len(times)
    except LeftDomain:
        # The last step that was tried failed: what lies before the last time at which it stood is safe.
        for count in range(len(times) - 1, 0, -1):
            if times[count - 1] <= max(passed):
                try:
                    return run(float(times[count - 1]), times[:count]), False
                except LeftDomain:
                    continue
        return np.empty((0, len(start))), False
