"""Direct attention: order parameters obey a closed system of ordinary differential equations."""

import numpy as np
from jaxtyping import Float

from specgrad.aim.observables import measure_matrices
from specgrad.aim.ode import LeftDomain, integrate
from specgrad.aim.task import Task

Start = tuple[Float[np.ndarray, " k"], Float[np.ndarray, "k k"], Float[np.ndarray, "k k"]]
State = tuple[Float[np.ndarray, "*times k"], Float[np.ndarray, "*times k k"], Float[np.ndarray, "*times k k"]]


def initial_order_parameters(task: Task, seed: int | None = None) -> Start:
    """Traces, Psi and Omega at the start: in the limit if ``seed`` is None, else of the matrices of that seed.

    In the limit different matrices are free: ``Psi_12 = Omega_12 = t_1 t_2``.
    """
    if seed is not None:
        return measure_matrices(task.matrices(seed))
    if task.student_matrix is not None or task.teacher_matrix is not None:
        raise ValueError("Given matrices need `seed` (any), since they have no limit d = infinity.")
    laws = [task.start] * task.students + [task.teacher] * (task.indices - task.students)
    scales = [task.student_scale] * task.students + [task.teacher_scale] * (task.indices - task.students)
    ratios = task.student_ratios + task.teacher_ratios
    traces = np.array([r * s if law == "wishart" else 0.0 for law, r, s in zip(laws, ratios, scales, strict=True)])
    psi = np.outer(traces, traces)
    omega = psi.copy()
    for k, (law, r, s) in enumerate(zip(laws, ratios, scales, strict=True)):
        square = {"gaussian": s, "symmetric": s, "wishart": r * s * s * (1 + r), "traceless": r * s * s}[law]
        omega[k, k] = square
        psi[k, k] = 0.0 if law == "gaussian" else square
    return traces, psi, omega


def solve_closed(
    task: Task,
    times: Float[np.ndarray, " times"],
    *,
    seed: int | None = None,
    start: Start | None = None,
    rtol: float = 1e-8,
) -> State:
    """Traces, Psi and Omega at ``times``, in the unit ``lr n/d`` of the direct flow.

    ``dOmega/dtau = X + X^T`` with ``X = -2 (A Omega + B Psi) - gamma 1_T Omega``, and the same with Psi and Omega exchanged.

    Args:
        task: a direct task.
        times: where the solution is wanted, ascending from 0.
        seed: None starts from the limit, else from the order parameters of that draw.
        start: traces, Psi and Omega to start from instead.
        rtol: relative tolerance in time.

    Source: attention-indexed models, Theorem 4.
    """
    if task.attention != "direct":
        raise ValueError("`method` 'closed' of `aim.solve` needs attention='direct'; tied attention has no closed system.")
    k = task.indices
    frozen = [i for i in range(k) if i not in task.trained]
    decay = np.zeros(k)
    decay[list(task.trained)] = task.weight_decay
    potential = task.potential

    def rhs(_: float, state: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        t, psi, omega = _unpack(state, k)
        try:
            found = potential.evaluate(psi, omega)
        except ValueError as error:
            raise LeftDomain from error
        a, b = found.a.copy(), found.b.copy()
        a[frozen], b[frozen] = 0, 0
        x = -2 * (a @ omega + b @ psi) - decay[:, None] * omega
        y = -2 * (a @ psi + b @ omega) - decay[:, None] * psi
        return np.concatenate([-2 * (a + b) @ t - decay * t, (y + y.T).ravel(), (x + x.T).ravel()])

    begin = initial_order_parameters(task, seed) if start is None else start
    vector = np.concatenate([np.asarray(part, dtype=float).ravel() for part in begin])
    # The invariant set is left exponentially: an absolute tolerance far below 1/d keeps rounding from seeding the escape.
    return _unpack(integrate(rhs, vector, times, rtol=rtol, atol=1e-14), k)


def _unpack(states: Float[np.ndarray, "*times n"], k: int) -> State:
    shape = (*states.shape[:-1], k, k)
    return states[..., :k], states[..., k : k + k * k].reshape(shape), states[..., k + k * k :].reshape(shape)
