"""The second route to the potential's gradient: differentiate Phi through a Cholesky factor of the scores' covariance."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float

from specgrad.aim.quadrature import gauss_hermite, grid_for, sobol_points

if TYPE_CHECKING:
    from specgrad.aim.potential import Potential


def gamma_by_autodiff(potential: "Potential", q: Float[np.ndarray, "k k"]) -> Float[np.ndarray, "k k"]:
    """Gradient of ``sum_terms E f(chol(Sigma(q)) z)`` with respect to the entries of q, counted separately.

    It uses first derivatives of the loss only, so it checks the Hessian route and its convention.

    Raises:
        ValueError: if the covariance of some term's features is singular.
    """
    at = torch.tensor(q, dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for group in potential.groups:
        n = len(group.means)
        sigma = (torch.from_numpy(group.along + group.across) @ at.reshape(-1)).reshape(n, n)
        factor, failed = torch.linalg.cholesky_ex(sigma)
        if failed.item():
            raise ValueError(
                f"`q` must give each term a positive definite covariance for route='autodiff'; got {q.tolist()}."
            )
        if group.function.degree is not None:
            nodes: int | None = group.function.degree // 2 + 1
        else:
            size = float(np.linalg.eigvalsh(sigma.detach().numpy())[-1])
            nodes, _ = grid_for(group.function, size, False, n, potential.tol)
        if nodes is None:
            z = sobol_points(n, potential.seed).reshape(-1, n)
            weights = torch.full((len(z),), 1 / len(z), dtype=torch.float64)
        else:
            z, weights = gauss_hermite(nodes, n)
        total = total + group.count * (weights @ group.function.value(z @ factor.T))
    (gradient,) = torch.autograd.grad(total, at)
    return gradient.numpy()
