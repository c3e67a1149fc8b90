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
        ValueError: if q is not positive definite.
    """
    at = torch.tensor(q, dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for group in potential.groups:
        span = _span(group.along + group.across, len(group.means))
        n = span.shape[1]
        full = torch.from_numpy(group.along + group.across) @ at.reshape(-1)
        sigma = span.T @ full.reshape(len(span), len(span)) @ span
        factor, failed = torch.linalg.cholesky_ex(sigma)
        if failed.item():
            raise ValueError(f"`q` must be positive definite for route='autodiff'; got {q.tolist()}.")
        if group.function.degree is not None:
            nodes: int | None = group.function.degree // 2 + 1
        else:
            size = float(np.linalg.eigvalsh(sigma.detach().numpy())[-1])
            nodes, _ = grid_for(group.function, size, False, n, potential.tol) if n == len(span) else (None, 0.0)
        if nodes is None:
            z = sobol_points(n, potential.seed).reshape(-1, n)
            weights = torch.full((len(z),), 1 / len(z), dtype=torch.float64)
        else:
            z, weights = gauss_hermite(nodes, n)
        total = total + group.count * (weights @ group.function.value(z @ factor.T @ span.T))
    (gradient,) = torch.autograd.grad(total, at)
    return gradient.numpy()


def _span(law: Float[np.ndarray, "n2 k2"], features: int) -> Float[torch.Tensor, "n rank"]:
    """Orthonormal directions that the features fill for every positive definite q: symmetric S give ``G_ij = G_ji``."""
    indices = round(law.shape[1] ** 0.5)
    values, vectors = np.linalg.eigh((law @ np.eye(indices).ravel()).reshape(features, features))
    return torch.from_numpy(np.ascontiguousarray(vectors[:, values > 1e-10 * values[-1]]))
