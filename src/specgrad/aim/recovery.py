"""Weak and strong recovery: initial slopes, the time to a given overlap, rates and tails of convergence."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from specgrad.aim.basis import initial_operators
from specgrad.aim.direct import initial_order_parameters
from specgrad.aim.task import Task

# Excess losses below this are rounding of terms of order one.
_ROUNDING = 1e-12


def initial_slope(task: Task, seed: int | None = None) -> dict[str, float]:
    """Slope at time 0 of the student's overlap with the teacher, ``p_12``, from an uninformative start.

    Tied: ``dp_12/dt = -2 Gamma_12(q) t_1 p_22``. Direct: ``dp_Omega,12/dtau = -2 (A_12 p_Omega,22 + B_12 p_Psi,22)`` and the
    same with Omega and Psi exchanged.

    Args:
        task: one student and one teacher.
        seed: None for the limit d = infinity; else order parameters of that draw, used as if the start were uninformative.

    Returns:
        ``dp12`` if tied; ``dpOmega12`` and ``dpPsi12`` if direct.

    Raises:
        ValueError: unless there are one trained student and one frozen teacher.

    Example:
        >>> round(initial_slope(Task(activation="h2"))["dp12"], 12)
        0.5

    Source: attention-indexed models, Corollaries 3 and 7.
    """
    if not task.single:
        raise ValueError("`aim.initial_slope` needs one trained student and one frozen teacher.")
    if task.attention == "tied":
        seen = initial_operators(task, 1, seed)[:, :, 0]
        q, t = seen @ seen.T, seen[:, 0]
        gamma = task.potential.gamma(q)
        return {"dp12": float(-2 * gamma[0, 1] * t[0] * (q[1, 1] - t[1] ** 2))}
    t, psi, omega = initial_order_parameters(task, seed)
    return direct_slope(task, t, psi, omega)


def direct_slope(
    task: Task, t: Float[np.ndarray, "2"], psi: Float[np.ndarray, "2 2"], omega: Float[np.ndarray, "2 2"]
) -> dict[str, float]:
    """Corollary 7 at given traces, Psi and Omega of direct attention."""
    found = task.potential.evaluate(psi, omega)
    p_omega, p_psi = omega[1, 1] - t[1] ** 2, psi[1, 1] - t[1] ** 2
    a, b = found.a[0, 1], found.b[0, 1]
    return {"dpOmega12": float(-2 * (a * p_omega + b * p_psi)), "dpPsi12": float(-2 * (a * p_psi + b * p_omega))}


def recovery_time(columns: dict[str, Any], level: float = 0.5) -> Float[np.ndarray, "*seeds"]:
    """First time at which ``|overlap| >= level``, linear between measurements; NaN where it is not reached.

    Args:
        columns: of `specgrad.aim.solve` (gives a scalar array) or `specgrad.aim.simulate` (one entry per seed).
        level: share of the teacher that counts as recovered.
    """
    if not level > 0:
        raise ValueError(f"`level` of `aim.recovery_time` must be > 0; got {level}.")
    share = np.abs(columns["overlap"])
    times = np.asarray(columns["t"])
    found = np.full(share.shape[:-1], np.nan)
    for place in np.ndindex(found.shape):
        row = share[place]
        above = np.flatnonzero(row >= level)
        if len(above) == 0:
            continue
        i = above[0]
        if i == 0:
            found[place] = times[0]
        else:
            part = (level - row[i - 1]) / (row[i] - row[i - 1])
            found[place] = times[i - 1] + part * (times[i] - times[i - 1])
    return found


def samples_at(task: Task, time: float, lr: float, batch_size: int = 1) -> float:
    """Samples used up to a time, in units of ``d^2 log d``.

    At the largest rate that the limit allows, ``lr`` of order ``1/(d log d)`` with one sample per step, a time of order one
    is a number of order one.

    Raises:
        ValueError: for a task without ``dim``.
    """
    if task.dim is None:
        raise ValueError("`dim` of `aim.Task` must be given to count samples; got None.")
    per_step = (4.0 if task.attention == "tied" else 1.0) * lr / task.dim
    return time / per_step * batch_size / (task.dim**2 * math.log(task.dim))


@dataclass(frozen=True)
class Convergence:
    """How the loss approaches its limit along a solution.

    Attributes:
        t: times, between those of the solution.
        rate: ``c(t) = -1/2 d log(F - F*)/dt``: constant under a Polyak-Lojasiewicz condition.
        exponent: ``-d log(F - F*)/d log t``: constant for a power law.
        kind: ``exponential`` if the rate varies less than the exponent over the last third of the times, else ``power law``.
    """

    t: Float[np.ndarray, " times"]
    rate: Float[np.ndarray, " times"]
    exponent: Float[np.ndarray, " times"]
    kind: str


def convergence(columns: dict[str, Any], optimum: float = 0.0, weight_decay: float = 0.0) -> Convergence:
    """Local rate and local power of the approach to the optimum, ``F = Phi + (gamma/2) t_1`` (``Omega_11`` if direct).

    Args:
        columns: of `specgrad.aim.solve`, with times > 0 that reach into the tail; one student.
        optimum: F*.
        weight_decay: gamma.

    Raises:
        ValueError: if F falls below the optimum or there are fewer than 6 times > 0.

    Source: attention-indexed models, appendix D.5.
    """
    times = np.asarray(columns["t"], dtype=float)
    norm = columns["t1"] if "q11" in columns else columns["Omega11"]
    excess = np.asarray(columns["loss"]) + weight_decay / 2 * norm - optimum
    positive = times > 0
    times, excess = times[positive], excess[positive]
    # Losses this small are rounding of their terms.
    if (excess < -_ROUNDING).any():
        raise ValueError(
            f"`optimum` of `aim.convergence` must lie below the losses; got {optimum}, above by {-excess.min():.3g}."
        )
    resolved = excess > _ROUNDING
    times, excess = times[resolved], excess[resolved]
    if len(times) < 6:
        raise ValueError(
            f"`columns` of `aim.convergence` must hold at least 6 times > 0 with a loss above rounding; got {len(times)}."
        )
    change = np.diff(np.log(excess))
    middle = np.sqrt(times[1:] * times[:-1])
    rate, exponent = -change / np.diff(times) / 2, -change / np.diff(np.log(times))
    last = slice(2 * len(middle) // 3, None)

    def variation(values: np.ndarray) -> float:
        return float(np.std(values[last]) / abs(np.mean(values[last])))

    kind = "exponential" if variation(rate) < variation(exponent) else "power law"
    return Convergence(middle, rate, exponent, kind)
