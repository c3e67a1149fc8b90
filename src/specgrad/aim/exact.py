"""The tied flow at d = infinity without truncation: one Gaussian student, one frozen teacher, any loss.

``dW/dt = -(a W W^T + b S_2 + c) W`` with ``a = Gamma_11``, ``b = Gamma_12``, ``c = gamma/4`` is solved by
``S_1(t) = E W_0 (1 + W_0^T K W_0)^-1 W_0^T E`` with ``E = exp(-S_2 int b - c t)`` and ``K = 2 int a E^2``, both functions
of S_2. At infinite dimension the resolvent in the middle is replaced by its deterministic equivalent ``(1/s + K)^-1``. What
is left are ``B = int b``, the eigenvalues of K at the nodes of the teacher's spectral law, and the scalar s.

K grows like ``E^2`` and s may shrink as fast. The state holds ``m = K/E^2``, which stays of order one, and log s; everything
else is written in m and ``h = 1/(s E^2)``, so that long times neither overflow nor cancel.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from specgrad.aim.ensembles import spectral_nodes
from specgrad.aim.ode import LeftDomain, integrate
from specgrad.aim.task import Task

Vector = Float[np.ndarray, " nodes"]

# exp beyond this would overflow when squared; a node with such an h has long left, or has not begun to move.
_LARGEST_EXPONENT = 330.0

# The system relaxes at rates of order one, so that an explicit method is the cheaper one up to about this time.
_LONG = 30.0


@dataclass(frozen=True)
class Reduced:
    """The reduced flow of one student and one teacher.

    Attributes:
        nodes: eigenvalues x of the teacher.
        weights: their weights.
        ratio: rank of the student over d.
        scale: its scale.
        decay: ``c = gamma/4``.
        gamma: maps (q11, q12, q22) to (a, b).
    """

    nodes: Vector
    weights: Vector
    ratio: float
    scale: float
    decay: float
    gamma: Callable[[float, float, float], tuple[float, float]]

    @property
    def q22(self) -> float:
        """``tr(S_2^2)``."""
        return float(self.weights @ self.nodes**2)

    @property
    def start(self) -> Float[np.ndarray, " state"]:
        """The state at time 0: ``B, log s, m``."""
        return np.concatenate([[0.0, np.log(self.ratio * self.scale)], np.zeros_like(self.nodes)])

    def overlaps(self, time: float, state: Float[np.ndarray, " state"]) -> tuple[float, float, float]:
        """``t1, q11, q12`` at a state."""
        return self._overlaps(*self._scaled(time, state))

    def rhs(self, time: float, state: Float[np.ndarray, " state"]) -> Float[np.ndarray, " state"]:
        """Derivative of the state."""
        log_s, h, m = self._scaled(time, state)
        _, q11, q12 = self._overlaps(log_s, h, m)
        a, b = self.gamma(q11, q12, self.q22)
        # The derivative of log s follows from s (1 + scale tau) = ratio scale, with dK/dt = 2 a E^2.
        share = self.weights * h / (h + m) ** 2
        growth = -2 * a * self.scale * float(share.sum()) / (np.exp(log_s) + self.scale * float(share @ m))
        return np.concatenate([[b, growth], 2 * a + 2 * (b * self.nodes + self.decay) * m])

    def _overlaps(self, log_s: float, h: Vector, m: Vector) -> tuple[float, float, float]:
        inverse = self.weights / (h + m)
        second = inverse / (h + m)
        # d log s along K -> K + eta E^2, from the deterministic equivalent.
        slope = -float(second @ h) / (self.ratio - float(second @ m**2))
        return float(inverse.sum()), float(second @ (1 - slope * h)), float(inverse @ self.nodes)

    def _scaled(self, time: float, state: Float[np.ndarray, " state"]) -> tuple[float, Vector, Vector]:
        """``log s``, h and m, after Newton steps on ``s (1 + scale tau(s)) = ratio scale`` from the integrated s.

        Raises:
            LeftDomain: where ``1 + s k(x)`` is no longer positive at every node.
        """
        m, log_s = state[2:], float(state[1])
        exponent = 2 * (state[0] * self.nodes + self.decay * time)
        for _ in range(4):
            h = np.exp(np.clip(exponent - log_s, -_LARGEST_EXPONENT, _LARGEST_EXPONENT))
            below = h + m
            if not (below > 0).all():
                raise LeftDomain
            s = np.exp(log_s)
            value = s + self.scale * (float(self.weights @ (m / below)) - self.ratio)
            derivative = s + self.scale * float(self.weights @ (m * h / below**2))
            step = value / derivative if derivative > 0 else 0.0
            if not abs(step) < 0.5:
                break
            log_s -= step
            if abs(step) < 1e-9:
                break
        h = np.exp(np.clip(exponent - log_s, -_LARGEST_EXPONENT, _LARGEST_EXPONENT))
        return log_s, h, m


# Nodes of the teacher's spectral law: 32 already give 1e-10 in smooth cases; the low edge of a square Wishart spectrum
# needs more as time goes on.
NODES = 96


def reduced_flow(task: Task, nodes: int = NODES) -> Reduced:
    """The reduced flow of a task.

    The teacher's law is its ensemble's limit, or the spectrum of a given teacher matrix.

    Raises:
        ValueError: unless there is one trained Gaussian student with tied attention and one frozen teacher.
    """
    if task.attention != "tied" or not task.single or task.student_matrix is not None:
        raise ValueError(
            "`method` 'exact' of `aim.solve` needs tied attention, one trained Gaussian student and one frozen teacher; "
            "use 'closure', or 'flow' at finite dim."
        )
    if task.teacher_matrix is not None:
        x = np.linalg.eigvalsh(np.asarray(task.teacher_matrix, dtype=float))
        w = np.full(len(x), 1 / len(x))
    else:
        x, w = spectral_nodes(task.teacher, task.teacher_ratios[0], task.teacher_scale, nodes)
    potential, q22 = task.potential, float(w @ x**2)

    def gamma(q11: float, q12: float, _: float) -> tuple[float, float]:
        try:
            found = potential.gamma(np.array([[q11, q12], [q12, q22]]))
        except ValueError as error:
            raise LeftDomain from error
        return float(found[0, 0]), float(found[0, 1])

    return Reduced(x, w, task.student_ratios[0], task.student_scale, task.weight_decay / 4, gamma)


def solve_exact(
    task: Task, times: Float[np.ndarray, " times"], *, nodes: int = NODES, rtol: float = 1e-8
) -> tuple[Float[np.ndarray, "times k"], Float[np.ndarray, "times k k"]]:
    """Traces and q at ``times``, in the unit ``4 lr n/d`` of the tied flow."""
    flow = reduced_flow(task, nodes)
    method = "LSODA" if times[-1] > _LONG else "DOP853"
    states = integrate(flow.rhs, flow.start, times, rtol=rtol, atol=1e-11, method=method, limit=1e140)
    t2 = float(flow.weights @ flow.nodes)
    traces = np.full((len(times), 2), np.nan)
    q = np.full((len(times), 2, 2), np.nan)
    for i, (time, state) in enumerate(zip(times, states, strict=True)):
        if np.isfinite(state).all():
            t1, q11, q12 = flow.overlaps(float(time), state)
            traces[i], q[i] = (t1, t2), [[q11, q12], [q12, flow.q22]]
    return traces, q
