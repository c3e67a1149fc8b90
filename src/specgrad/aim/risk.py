"""The smallest limiting loss over the order parameters that trained matrices can have beside frozen teachers."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.optimize import minimize

from specgrad.aim.direct import initial_order_parameters
from specgrad.aim.ensembles import spectral_nodes
from specgrad.aim.task import Task
from specgrad.runs.seeds import stream

Overlaps = tuple[Float[np.ndarray, "k k"], Float[np.ndarray, "k k"]]

# Local minimisations from different starts, since R need not be convex.
_STARTS = 8

# Many nodes, since the student's rank cuts the teacher's spectrum at a quantile.
_NODES = 600


@dataclass(frozen=True)
class MinimumRisk:
    """The smallest limiting loss of a task and where it is attained.

    Attributes:
        value: the minimum of R over the feasible set.
        psi: ``tr(S_k S_l)`` there.
        omega: ``tr(S_k S_l^T)`` there.
    """

    value: float
    psi: Float[np.ndarray, "k k"]
    omega: Float[np.ndarray, "k k"]


def minimum_risk(task: Task, seed: int = 0) -> MinimumRisk:
    """Minimum of the limiting loss over the order parameters that the students can have beside frozen teachers.

    Direct, any number of students and teachers: the symmetric and the antisymmetric parts of the S have any Gram matrices
    ``(Omega + Psi)/2`` and ``(Omega - Psi)/2`` that hold those of the teachers. Tied, one student and one teacher: S_1 is
    PSD of rank ``student_ratio d``, so ``q_11 >= q_12^2 / m``, where m is ``tr(S_2^2)`` over the largest positive
    eigenvalues that fit in this rank, or over the most negative ones if ``q_12 < 0``.

    Args:
        task: tied with one student and one teacher, or direct with untrained teachers.
        seed: seed of the starts of the minimisation; the best of several local minima is given.

    Raises:
        ValueError: for another task, or given matrices, which have no limit.

    Example:
        >>> round(minimum_risk(Task(activation="h1")).value, 6)
        0.0
        >>> two = Task(attention="direct", activation="tanh", student_ratio=(1.0, 1.0), teacher_ratio=(1.0, 1.0))
        >>> abs(minimum_risk(two).value) < 1e-6
        True

    Source: attention-indexed models, Corollary 1.
    """
    tied = task.attention == "tied"
    if task.student_matrix is not None or task.teacher_matrix is not None:
        raise ValueError("`aim.minimum_risk` needs limiting laws, without given matrices.")
    if tied and not task.single:
        raise ValueError("`aim.minimum_risk` of tied attention needs one trained student and one frozen teacher.")
    if not tied and task.trained != tuple(range(task.students)):
        raise ValueError("`aim.minimum_risk` needs trained students and frozen teachers.")
    return _tied(task) if tied else _direct(task, seed)


def _direct(task: Task, seed: int) -> MinimumRisk:
    """Students as vectors beside the teachers' in two spaces, symmetric and antisymmetric, with room for free directions."""
    _, psi0, omega0 = initial_order_parameters(task)
    s, k = task.students, task.indices
    teachers = [_vectors((omega0 + sign * psi0)[s:, s:] / 2) for sign in (1, -1)]

    def frames(x: Float[np.ndarray, " n"]) -> list[Float[np.ndarray, "k k"]]:
        halves = x.reshape(2, s, k)
        return [np.vstack([half, np.pad(t, ((0, 0), (0, s)))]) for half, t in zip(halves, teachers, strict=True)]

    def overlaps(x: Float[np.ndarray, " n"]) -> Overlaps:
        even, odd = (v @ v.T for v in frames(x))
        return even - odd, even + odd

    def risk(x: Float[np.ndarray, " n"]) -> tuple[float, Float[np.ndarray, " n"]]:
        found = task.potential.evaluate(*overlaps(x))
        slopes = zip((found.a + found.b, found.a - found.b), frames(x), strict=True)
        return found.value, np.concatenate([(2 * (slope @ v)[:s]).ravel() for slope, v in slopes])

    generator = stream(seed, "risk")
    size = float(np.sqrt(omega0.diagonal()[s:].mean()))
    starts = size * torch.randn(_STARTS, 2 * s * k, generator=generator, dtype=torch.float64).numpy()
    # Rounding can leave the line search without progress at the minimum, which is no failure.
    found = [minimize(risk, x, jac=True, method="BFGS", options={"gtol": 1e-9}) for x in starts]
    best = min(found, key=lambda one: one.fun)
    return MinimumRisk(float(best.fun), *overlaps(best.x))


def _vectors(gram: Float[np.ndarray, "t t"]) -> Float[np.ndarray, "t t"]:
    """Rows with these inner products."""
    values, vectors = np.linalg.eigh(gram)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0)))


def _tied(task: Task) -> MinimumRisk:
    build = _tied_feasible(task)

    def risk(x: Float[np.ndarray, "2"]) -> float:
        return task.potential.value(build(x)[0])

    settings = {"method": "Nelder-Mead", "options": {"xatol": 1e-9, "fatol": 1e-13, "maxiter": 4000}}
    found = [minimize(risk, np.array(x), **settings) for x in ((1.0, 0.1), (0.1, 0.5), (-0.7, 0.3), (0.5, 0.0))]
    best = min(found, key=lambda one: one.fun)
    return MinimumRisk(float(best.fun), *build(best.x))


def _tied_feasible(task: Task) -> Callable[[Float[np.ndarray, "2"]], Overlaps]:
    """Order parameters from ``a = q_12/m``, of either sign, and the root of what q_11 exceeds its bound by."""
    x, w = spectral_nodes(task.teacher, task.teacher_ratios[0], task.teacher_scale, _NODES)
    q22 = float(w @ x**2)

    def reach(signed: Float[np.ndarray, " nodes"]) -> float:
        order = np.argsort(-signed)
        held = w[order]
        inside = np.clip(task.student_ratios[0] - (np.cumsum(held) - held), 0, held)
        return float(inside @ np.maximum(signed[order], 0) ** 2)

    positive, negative = reach(x), reach(-x)

    def build(parameters: Float[np.ndarray, "2"]) -> Overlaps:
        a, noise = float(parameters[0]), float(parameters[1]) ** 2
        m = positive if a > 0 else negative
        q = np.array([[a * a * m + noise, a * m], [a * m, q22]])
        return q, q

    return build
