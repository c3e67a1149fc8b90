"""Weak and strong recovery: initial slopes, the time to a given overlap, rates and tails of convergence."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.optimize import brentq

from specgrad.aim.basis import initial_operators
from specgrad.aim.direct import initial_order_parameters
from specgrad.aim.ensembles import spectral_nodes
from specgrad.aim.exact import NODES
from specgrad.aim.task import Task

# Excess losses below this are rounding of terms of order one.
_ROUNDING = 1e-12

# Relative step of the derivative along S_2, and what counts as zero beside Gamma_11.
_STEP, _SMALL = 1e-4, 1e-6


def initial_slope(task: Task, seed: int | None = None) -> dict[str, float]:
    """Slope at time 0 of the student's overlap with the teacher, ``p_12``, from an uninformative start.

    Tied: ``dp_12/dt = -2 Gamma_12(q) t_1 p_22``. Direct: ``dp_Omega,12/dtau = -2 (A_12 p_Omega,22 + B_12 p_Psi,22)`` and the
    same with Omega and Psi exchanged. Time is ``t = 4 lr n/d`` if tied and ``tau = lr n/d`` if direct, n the steps.

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

    Time is the columns': ``4 lr n/d`` for tied attention, ``lr n/d`` for direct, n the number of steps.

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

    Args:
        task: with ``dim``.
        time: in the unit of the columns, ``4 lr n/d`` if tied and ``lr n/d`` if direct.
        lr: learning rate of SGD.
        batch_size: samples per step.

    Raises:
        ValueError: for a task without ``dim``.
    """
    if task.dim is None:
        raise ValueError("`dim` of `aim.Task` must be given to count samples; got None.")
    if not (lr > 0 and batch_size >= 1):
        raise ValueError(f"`lr` of `aim.samples_at` must be > 0 and `batch_size` >= 1; got {lr} and {batch_size}.")
    per_step = (4.0 if task.attention == "tied" else 1.0) * lr / task.dim
    return time / per_step * batch_size / (task.dim**2 * math.log(task.dim))


@dataclass(frozen=True)
class Convergence:
    """How the loss approaches its limit along a solution.

    Attributes:
        t: times, between those of the solution and in their unit.
        rate: ``c(t) = -1/2 d log(F - F*)/dt``, per that unit: constant under a Polyak-Lojasiewicz condition.
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
    if np.shape(columns["loss"]) != times.shape or "q13" in columns or "Omega13" in columns:
        raise ValueError("`columns` of `aim.convergence` must be of `aim.solve`, with one student and one teacher.")
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


def polyak_constant(task: Task) -> float:
    """Constant c of the Polyak-Lojasiewicz condition ``-dF/dt >= 2 c (F - F*)`` near the teacher: F ends like exp(-2 c t).

    With ``g = Gamma_11 = -Gamma_12`` at ``S_1 = S_2``, a deviation D of a tied student obeys
    ``dD/dt = -g (D S_2 + S_2 D) - beta tr(D S_2) S_2^2``, with beta from how ``Gamma_11 + Gamma_12`` changes along S_2:
    ``Gamma_11 + Gamma_12 = (beta/2) tr(D S_2)``. Its rates are ``g (x_i + x_j)`` over
    eigenvalues x of S_2 and, for beta < 0, perhaps a lower root r of ``1 + beta E[x^3/(2 g x - r)] = 0``. Direct:
    ``dD/dtau = -2 g D - beta tr(D S_2) S_2``, and ``-2 (A_11 - B_11) D`` for the antisymmetric part, where the loss sees it.

    Time is ``4 lr n/d`` if tied and ``lr n/d`` if direct: an excess eps takes ``log(1/eps)/(2 c)`` of it.

    Args:
        task: one student and one teacher that it can reach: tied with a Wishart teacher, direct with a symmetric one; no
            weight decay, in the limit d = infinity.

    Returns:
        c; 0 for tied attention where the student's or the teacher's ratio is at most 1, so that eigenvalues come as close to
        0 as one likes: F then falls like ``t^-2.5`` (both ratios 1) or ``t^-2`` (teacher of lower rank).

    Raises:
        ValueError: for another task, or a loss whose minimum is not at the teacher.

    Example:
        >>> round(polyak_constant(Task(activation="h1", student_ratio=2.0, teacher_ratio=2.0)), 4)
        0.3431

    Source: attention-indexed models, appendix D.5; the linearisation is this project's.
    """
    tied = task.attention == "tied"
    reachable = task.teacher == "wishart" if tied else task.teacher != "gaussian"
    given = task.student_matrix is not None or task.teacher_matrix is not None
    if not task.single or not reachable or given or task.weight_decay > 0:
        raise ValueError(
            "`aim.polyak_constant` needs one student and one frozen teacher of a symmetric law (wishart if tied), no given "
            "matrices and no weight decay."
        )
    x, w = spectral_nodes(task.teacher, task.teacher_ratios[0], task.teacher_scale, NODES)
    q22, potential = float(w @ x**2), task.potential
    found = potential.evaluate(np.full((2, 2), q22))
    g = float((found.a + found.b)[0, 0])
    if not g > 0 or abs(potential.gamma(np.full((2, 2), q22))[0].sum()) > _SMALL * g:
        raise ValueError(
            "`loss` of the task of `aim.polyak_constant` must have its minimum where student and teacher agree."
        )

    def row(share: float) -> float:
        return float(potential.gamma(q22 * np.array([[share**2, share], [share, 1.0]]))[0].sum())

    beta = (row(1 + _STEP) - row(1 - _STEP)) / _STEP / q22
    if not tied:
        antisymmetric = 2 * float((found.a - found.b)[0, 0])
        rates = [2 * g, 2 * g + beta * q22] + ([antisymmetric] if antisymmetric > _SMALL * g else [])
        return min(rates)
    if min(task.student_ratios[0], task.teacher_ratios[0]) <= 1:
        return 0.0
    edge = 2 * g * task.teacher_scale * (task.teacher_ratios[0] ** 0.5 - 1) ** 2

    def secular(r: float) -> float:
        return 1 + beta * float(w @ (x**3 / (2 * g * x - r)))

    return float(edge if secular(edge) >= 0 else brentq(secular, 0.0, edge))
