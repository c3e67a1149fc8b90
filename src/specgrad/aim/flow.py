"""The noise-free flow of tied attention on matrices, and its closed form for the linear activation."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.linalg import cho_factor, cho_solve

from specgrad.aim.losses import SQUARED
from specgrad.aim.ode import LeftDomain, integrate
from specgrad.aim.task import Task

Traces = Float[np.ndarray, "times k"]
Overlaps = Float[np.ndarray, "times k k"]


@dataclass(frozen=True, eq=False)
class Factors:
    """Where a matrix flow starts.

    Attributes:
        matrices: W of each trained index, S of the others.
        probe: order parameters are ``q_kl = scale Tr(probe^T S_k S_l probe)``: a unit vector for the closure.
        scale: see ``probe``; None for ``probe`` takes all of S, with ``scale = 1/d``.
    """

    matrices: tuple[np.ndarray, ...]
    probe: np.ndarray | None
    scale: float


def solve_factors(
    task: Task, start: Factors, times: Float[np.ndarray, " times"], *, rtol: float = 1e-8
) -> tuple[Traces, Overlaps]:
    """Integrates ``dW_k/dt = -(sum_l Gamma_kl(q) S_l + gamma/4) W_k``; W keeps every S positive semidefinite."""
    shapes = {k: start.matrices[k].shape for k in task.trained}
    potential, decay = task.potential, task.weight_decay / 4

    def unpack(state: Float[np.ndarray, " n"]) -> dict[int, np.ndarray]:
        factors, place = {}, 0
        for k, shape in shapes.items():
            count = shape[0] * shape[1]
            factors[k] = state[place : place + count].reshape(shape)
            place += count
        return factors

    def all_matrices(factors: dict[int, np.ndarray]) -> list[np.ndarray]:
        return [factors[k] @ factors[k].T if k in factors else m for k, m in enumerate(start.matrices)]

    def measure(matrices: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        seen = np.stack([(m if start.probe is None else m @ start.probe).ravel() for m in matrices])
        first = (np.eye(len(matrices[0])) if start.probe is None else start.probe).ravel()
        return start.scale * seen @ first, start.scale * seen @ seen.T

    def rhs(_: float, state: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        factors = unpack(state)
        matrices = all_matrices(factors)
        try:
            gamma = potential.gamma(measure(matrices)[1])
        except ValueError as error:
            raise LeftDomain from error
        parts = []
        for k, w in factors.items():
            generator = sum(gamma[k, m] * matrix for m, matrix in enumerate(matrices))
            parts.append((-(generator @ w) - decay * w).ravel())
        return np.concatenate(parts)

    initial = np.concatenate([start.matrices[k].ravel() for k in task.trained])
    states = integrate(rhs, initial, times, rtol=rtol, atol=1e-3 * rtol)
    traces = np.full((len(times), task.indices), np.nan)
    q = np.full((len(times), task.indices, task.indices), np.nan)
    for i, state in enumerate(states):
        if np.isfinite(state).all():
            traces[i], q[i] = measure(all_matrices(unpack(state)))
    return traces, q


def solve_flow(
    task: Task, times: Float[np.ndarray, " times"], *, seed: int = 0, rtol: float = 1e-8
) -> tuple[Traces, Overlaps]:
    """Traces and q of the flow of the matrices drawn with ``seed``, at the task's finite ``dim``; time is ``4 lr n/d``.

    The linear activation with one student and one frozen teacher takes the closed form, everything else is integrated.

    Cost: two products of dim x rank matrices per trained index and right-hand side.

    Raises:
        ValueError: without ``dim``.
    """
    if task.attention != "tied":
        raise ValueError("`method` 'flow' of `aim.solve` needs tied attention; use 'closed' for direct.")
    weights = [w.numpy() for w in task.weights(seed)]
    if is_linear(task):
        return riccati(task, weights[0], weights[1], times)
    return solve_factors(task, Factors(tuple(weights), None, 1 / len(weights[0])), times, rtol=rtol)


def is_linear(task: Task) -> bool:
    """Whether Gamma is constant: the linear activation with the squared loss, one student and one frozen teacher."""
    return task.single and task.activation == "h1" and task.loss in SQUARED


def riccati(
    task: Task,
    w0: Float[np.ndarray, "dim rank"],
    teacher: Float[np.ndarray, "dim dim"],
    times: Float[np.ndarray, " times"],
) -> tuple[Traces, Overlaps]:
    """Closed form for constant Gamma = ``s [[1, -1], [-1, 1]]``, any W_0 and teacher, with weight decay.

    ``S_1(t) = E W_0 (1 + W_0^T K W_0)^-1 W_0^T E``, ``E = exp((s S_2 - gamma/4) t)``, ``K = 2 s int_0^t E^2``.

    Source: attention-indexed models, appendix D.3, beyond commuting matrices.
    """
    dim = len(w0)
    s = float(task.potential.gamma(np.eye(2))[0, 0])
    x, vectors = np.linalg.eigh(teacher)
    rotated = vectors.T @ w0
    traces = np.empty((len(times), 2))
    q = np.empty((len(times), 2, 2))
    for i, time in enumerate(times):
        rate = 2 * (s * x - task.weight_decay / 4)
        # E and K are scaled by exp of the largest positive rate, so that long times do not overflow; S_1 does not change.
        shift = max(float(rate.max()), 0.0) * time
        e = np.exp((rate * time - shift) / 2)
        k = 2 * s * _integral(rate, float(time), shift)
        half = rotated * e[:, None]
        gram = np.exp(-shift) * np.eye(w0.shape[1]) + rotated.T @ (k[:, None] * rotated)
        s1 = half @ cho_solve(cho_factor(gram), half.T)
        traces[i] = np.trace(s1) / dim, x.sum() / dim
        q12 = float((s1.diagonal() * x).sum()) / dim
        q[i] = [[float((s1**2).sum()) / dim, q12], [q12, float((x**2).sum()) / dim]]
    return traces, q


def _integral(rate: Float[np.ndarray, " dim"], time: float, shift: float) -> Float[np.ndarray, " dim"]:
    """``exp(-shift) int_0^time exp(rate u) du``, also where the rate is 0."""
    small = np.abs(rate * time) < 1e-8
    safe = np.where(small, 1.0, rate)
    general = (np.exp(rate * time - shift) - np.exp(-shift)) / safe
    return np.asarray(np.where(small, time * np.exp(-shift) * (1 + rate * time / 2), general))
