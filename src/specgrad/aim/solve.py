"""One interface to every theory of the training dynamics."""

import warnings
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Float

from specgrad.aim import closure, exact, hierarchy
from specgrad.aim.direct import solve_closed
from specgrad.aim.flow import is_linear, solve_flow
from specgrad.aim.hierarchy import solve_hierarchy, taylor_radius, trusted_until
from specgrad.aim.observables import order_columns, overlap
from specgrad.aim.ode import are_times
from specgrad.aim.task import Task

Method = Literal["auto", "exact", "closure", "hierarchy", "flow", "closed"]
Untrusted = Literal["warn", "raise", "nan", "keep"]
Times = Float[np.ndarray, " times"]

# Largest block that `auto` lets the closure grow to: order 7 for two matrices, 4 for three.
_LARGEST_CLOSURE = 300


@dataclass(frozen=True)
class _Found:
    """Order parameters of one method, with what is said about them; the overlaps are q if ``omega`` is None."""

    traces: Float[np.ndarray, "times k"]
    psi: Float[np.ndarray, "times k k"]
    omega: Float[np.ndarray, "times k k"] | None
    method: str
    why: str
    order: int | None = None
    trusted_until: float = float("inf")
    radius: float = float("inf")


def solve(
    task: Task,
    method: str = "auto",
    *,
    t_eval: Any = None,
    t_max: float | None = None,
    order: int | None = None,
    tol: float = 1e-2,
    seed: int | None = None,
    rtol: float = 1e-8,
    untrusted: str = "warn",
) -> dict[str, Any]:
    """Order parameters of the training dynamics as functions of time.

    Time is ``t = 4 lr n/d`` for tied attention and ``tau = lr n/d`` for direct, n the number of SGD steps at rate ``lr``.

    | method | of | how far |
    |---|---|---|
    | ``exact`` | tied, one Gaussian student, one frozen teacher, d = infinity | any time, no truncation |
    | ``closed`` | direct | any time, no truncation |
    | ``flow`` | tied, finite ``dim`` | any time; ``O(d^3)`` per right-hand side, closed form for h1 |
    | ``closure`` | tied, any number of students and teachers | any time; error falls with ``order`` m |
    | ``hierarchy`` | tied, any number | up to a radius; error falls with ``order`` M |
    | ``auto`` | all | the cheapest of these that meets ``tol``, which and why under ``method`` and ``why`` |

    Args:
        task: what is learned.
        method: see above.
        t_eval: times at which the solution is wanted, ascending, >= 0.
        t_max: 61 times from 0 to ``t_max`` instead.
        order: truncation M of the hierarchy (default 12) or degree m of the closure (default 4).
        tol: relative error that is accepted, of the truncated methods.
        seed: None for the limit d = infinity; else the start is the draw with this seed, at the task's ``dim``.
        rtol: relative tolerance of the integration in time.
        untrusted: what happens to times at which the hierarchy may be off by more than ``tol``: ``warn`` gives what came out
            with a warning, but refuses times beyond the radius, where no order helps; ``raise`` refuses them all, ``nan``
            puts NaN there, ``keep`` gives what came out.

    Returns:
        Arrays ``t`` (times), ``t1``, ``t2``, ... (traces ``tr S_k``), ``loss`` (the population loss Phi); for tied attention
        ``q11``, ``q12``, ... (``tr S_k S_l``) and their traceless parts ``p11``, ...; for direct ``Omega11``, ...,
        ``Psi11``, ..., ``pOmega11``, ...; ``overlap``, the share ``p12/p22`` (``pOmega12/pOmega22``) of the first teacher
        that the first student has. Beside them ``method``, ``why``, ``order``, ``trusted_until`` (time up to which
        the hierarchy agrees with a lower order) and ``radius`` (estimate of the time beyond which no order helps).

    Raises:
        ValueError: if the method does not fit the task, or ``t_eval`` goes beyond what it can do.

    Example:
        >>> out = solve(Task(activation="h2"), "exact", t_eval=[0.0, 1.0, 2.0])
        >>> out["q12"].round(4).tolist()
        [0.25, 0.4953, 0.4994]
        >>> solve(Task(activation="h2"), t_eval=[0.0, 1.0])["why"]
        'one Gaussian student and one frozen teacher: the exact solution at d = infinity'

    Source: attention-indexed models, equations (11) and (13), Theorem 4; the exact solution is this project's.
    """
    if method not in get_args(Method):
        raise ValueError(f"`method` of `aim.solve` must be one of {', '.join(get_args(Method))}; got {method!r}.")
    if untrusted not in get_args(Untrusted):
        raise ValueError(f"`untrusted` of `aim.solve` must be one of {', '.join(get_args(Untrusted))}; got {untrusted!r}.")
    for name, value in (("tol", tol), ("rtol", rtol)):
        if not 0 < value < 1:
            raise ValueError(f"`{name}` of `aim.solve` must lie between 0 and 1; got {value}.")
    if order is not None and not isinstance(order, Integral):
        raise ValueError(f"`order` of `aim.solve` must be an integer; got {order!r}.")
    if seed is not None and task.dim is None:
        raise ValueError("`seed` of `aim.solve` needs a task with `dim`; got dim None.")
    times = _times(t_eval, t_max)
    task.potential.check_smooth()
    found = _dispatch(task, method, times, order, tol, seed, rtol)
    found = _guard(found, times, tol, untrusted)
    columns = order_columns(found.traces, found.psi, found.omega)
    columns["overlap"] = overlap(columns, task.students + 1)
    about: dict[str, Any] = {"method": found.method, "why": found.why, "order": found.order}
    about |= {"trusted_until": found.trusted_until, "radius": found.radius}
    return {"t": times} | columns | {"loss": _losses(task, found)} | about


def _times(t_eval: Any, t_max: float | None) -> Times:
    if (t_eval is None) == (t_max is None):
        raise ValueError("`t_eval` or `t_max` of `aim.solve` must be given, and not both.")
    if t_eval is None:
        if t_max is None or not 0 < t_max < np.inf:
            raise ValueError(f"`t_max` of `aim.solve` must be finite and > 0; got {t_max}.")
        return np.linspace(0.0, t_max, 61)
    times = np.atleast_1d(np.asarray(t_eval, dtype=float))
    if not are_times(times):
        raise ValueError(f"`t_eval` of `aim.solve` must list finite, ascending times >= 0; got {t_eval}.")
    return times


def _dispatch(task: Task, method: str, times: Times, order: int | None, tol: float, seed: int | None, rtol: float) -> _Found:
    if method == "auto":
        return _auto(task, times, tol, seed, rtol)
    asked = "asked for"
    if method == "exact":
        if seed is not None:
            raise ValueError("`seed` of `aim.solve` must be None for 'exact', which is the limit; use 'flow' for one draw.")
        return _Found(*exact.solve_exact(task, times, rtol=rtol), None, method, asked)
    if method == "closed":
        return _Found(*solve_closed(task, times, seed=seed, rtol=rtol), method, asked)
    if method == "flow":
        return _Found(*solve_flow(task, times, seed=seed or 0, rtol=rtol), None, method, asked)
    if method == "closure":
        chosen = closure.DEFAULT_ORDER if order is None else order
        return _Found(*closure.solve_closure(task, times, chosen, seed=seed, rtol=rtol), None, method, asked, chosen)
    return _by_hierarchy(task, times, hierarchy.DEFAULT_ORDER if order is None else order, tol, seed, rtol)


def _by_hierarchy(task: Task, times: Times, order: int, tol: float, seed: int | None, rtol: float) -> _Found:
    """The truncation, and how long it agrees with the one two orders below (one, at the lowest orders)."""
    traces, q = solve_hierarchy(task, times, order, seed=seed, rtol=rtol)
    if order > 2:
        coarse = solve_hierarchy(task, times, max(order - 2, 2), seed=seed, rtol=rtol)
        until = trusted_until(times, _flat(traces, q), _flat(*coarse), tol)
    else:
        until = 0.0
    given = task.student_matrix is not None or task.teacher_matrix is not None
    radius = float("nan") if given else taylor_radius(task)
    return _Found(traces, q, None, "hierarchy", "asked for", order, until, radius)


def _auto(task: Task, times: Times, tol: float, seed: int | None, rtol: float) -> _Found:
    if task.attention == "direct":
        why = "direct attention: order parameters obey a closed system"
        return _Found(*solve_closed(task, times, seed=seed, rtol=rtol), "closed", why)
    if seed is None and task.single and task.student_matrix is None and task.teacher_matrix is None:
        why = "one Gaussian student and one frozen teacher: the exact solution at d = infinity"
        return _Found(*exact.solve_exact(task, times, rtol=rtol), None, "exact", why)
    if seed is not None and is_linear(task):
        why = "linear activation, squared loss, one student and teacher: closed form at this dim"
        return _Found(*solve_flow(task, times, seed=seed, rtol=rtol), None, "flow", why)
    return _converged_closure(task, times, tol, seed, rtol)


def _converged_closure(task: Task, times: Times, tol: float, seed: int | None, rtol: float) -> _Found:
    """The closure at the lowest order that agrees with the one below; the matrix flow if none does and there is a draw."""
    before, distance, order = None, np.inf, 1
    while True:
        now = closure.solve_closure(task, times, order, seed=seed, rtol=rtol)
        flat = _flat(*now)
        if before is not None:
            distance = float((np.abs(flat - before).max(axis=1) / np.abs(flat).max(axis=1)).max())
            if distance <= tol:
                why = f"operator closure: orders {order - 1} and {order} agree to {distance:.1e}"
                return _Found(*now, None, "closure", why, order)
        if closure.block_size(task.indices, order + 1) > _LARGEST_CLOSURE:
            break
        before, order = flat, order + 1
    if seed is not None:
        why = f"matrix flow: the closure's orders {order - 1} and {order} still differ by {distance:.1e}"
        return _Found(*solve_flow(task, times, seed=seed, rtol=rtol), None, "flow", why)
    message = f"the closure's orders {order - 1} and {order} differ by {distance:.1e}, more than tol {tol:g}"
    warnings.warn(f"aim.solve: {message}; give `seed` and `dim` for the matrix flow.", stacklevel=4)
    return _Found(*now, None, "closure", f"no method meets tol: {message}", order)


def _guard(found: _Found, times: Times, tol: float, untrusted: str) -> _Found:
    """Refuses or blanks what the method cannot answer for."""
    broken = ~np.isfinite(found.psi).all(axis=(1, 2))
    if found.method != "hierarchy":
        if broken.any():
            raise ValueError(
                f"`t_eval` of `aim.solve` must end before t = {times[np.argmax(broken)]:.4g} for method {found.method!r}, "
                "where the solution leaves the range of numbers or of PSD order parameters."
            )
        return found
    late = times > found.trusted_until
    # The radius of given matrices is not known (NaN); then only what cannot be a number is refused.
    hopeless = broken | (late & (times > (np.inf if np.isnan(found.radius) else found.radius)))
    reason = (
        f"from t = {found.trusted_until:.4g} on, orders {found.order} and below of the hierarchy differ by more than tol "
        f"{tol:g} (estimated radius of convergence {found.radius:.3g}). "
        "Use 'exact' or 'closure', or untrusted='nan' or 'keep'."
    )
    if (untrusted == "raise" and late.any()) or (untrusted == "warn" and hopeless.any()):
        until = found.trusted_until if untrusted == "raise" else max(times[~hopeless], default=0.0)
        raise ValueError(f"`t_eval` of `aim.solve` must end at t = {until:.4g} here: {reason}")
    if untrusted == "warn" and late.any():
        warnings.warn(f"aim.solve: {reason}", stacklevel=3)
    if untrusted == "nan":
        traces, psi = found.traces.copy(), found.psi.copy()
        traces[late], psi[late] = np.nan, np.nan
        return _Found(traces, psi, None, found.method, found.why, found.order, found.trusted_until, found.radius)
    return found


def _flat(traces: Float[np.ndarray, "times k"], q: Float[np.ndarray, "times k k"]) -> Float[np.ndarray, "times n"]:
    return np.concatenate([traces, q.reshape(len(q), -1)], axis=1)


def _losses(task: Task, found: _Found) -> Float[np.ndarray, " times"]:
    losses = np.full(len(found.psi), np.nan)
    for i, psi in enumerate(found.psi):
        if np.isfinite(psi).all():
            try:
                losses[i] = task.potential.value(psi, None if found.omega is None else found.omega[i])
            except ValueError:  # a truncation outside of the PSD cone has no loss
                continue
    return losses
