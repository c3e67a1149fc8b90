"""The operator closure: the flow of the matrices' action on short words, a noncommutative Gauss quadrature.

It uses the same moments as the hierarchy at order 2m + 1, but the small matrices J_k = W W^T obey the matrix flow itself, so
they stay PSD and never blow up.
"""

import numpy as np
from jaxtyping import Float

from specgrad.aim.basis import initial_operators
from specgrad.aim.flow import Factors, solve_factors
from specgrad.aim.task import Task

DEFAULT_ORDER = 4

# Blocks beyond this cost more than the flow of matrices that large.
_LARGEST_BLOCK = 4096


def block_size(indices: int, order: int) -> int:
    """Rows of the operators: alternating strings of total degree up to ``order``.

    Example:
        >>> [block_size(2, order) for order in (1, 2, 4)]
        [3, 7, 31]
    """
    return 1 + sum(int(indices**degree) for degree in range(1, order + 1))


def solve_closure(
    task: Task,
    times: Float[np.ndarray, " times"],
    order: int = DEFAULT_ORDER,
    *,
    seed: int | None = None,
    rtol: float = 1e-8,
) -> tuple[Float[np.ndarray, "times k"], Float[np.ndarray, "times k k"]]:
    """Traces and q at ``times``, in the unit ``4 lr n/d`` of the tied flow.

    ``dJ_k/dt = -(H_k J_k + J_k H_k)`` with ``H_k = sum_l Gamma_kl(q) J_l + gamma/4``, ``q_kl = <J_k e0, J_l e0>`` and
    ``t_k = <e0, J_k e0>``.

    Args:
        task: a tied task.
        times: where the solution is wanted, ascending from 0.
        order: m; two matrices have blocks of size ``2^(m+1) - 1``.
        seed: None for the limit d = infinity, else the draw that is solved.
        rtol: relative tolerance in time.

    Cost: a few products of matrices of that size per right-hand side.
    """
    if order < 1:
        raise ValueError(f"`order` of the closure must be >= 1; got {order}.")
    if block_size(task.indices, order) > _LARGEST_BLOCK:
        raise ValueError(
            f"`order` of the closure of {task.indices} matrices must be lower: blocks have at most {_LARGEST_BLOCK} rows; "
            f"got {order}, that is {block_size(task.indices, order):,} rows."
        )
    operators = initial_operators(task, order, seed)
    size = operators.shape[1]
    unit = np.eye(size)[:, :1]
    factors: list[np.ndarray] = []
    for k, operator in enumerate(operators):
        if k not in task.trained:
            factors.append(operator)
            continue
        values, vectors = np.linalg.eigh(operator)
        factors.append(vectors * np.sqrt(np.maximum(values, 0)))
    return solve_factors(task, Factors(tuple(factors), unit, 1.0), times, rtol=rtol)
