"""Squared sums of one-variable functions of Gaussian features: pairs of features suffice, and a pair is a series.

With ``a_n = E f(sigma x) he_n(x)`` and he_n the Hermite polynomials of unit norm, ``E f(y_1) g(y_2) = sum_n a_n b_n rho^n``.
So K features cost K integrals over one variable instead of one over K.
"""

from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float

from specgrad.aim.losses import SquaredDifference
from specgrad.aim.quadrature import Moments, agreeing

# Numbers of terms that are tried one after the other.
SERIES = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)

# he_n times the Gaussian density falls below exp(-x^2/4): beyond this x nothing is left of functions of moderate growth.
_REACH = 12.0


@lru_cache(maxsize=32)
def hermite_projection(terms: int) -> tuple[Float[np.ndarray, " nodes"], Float[np.ndarray, "nodes terms"]]:
    """Nodes x_i and ``w_i he_n(x_i)``, which maps values at the nodes to Hermite coefficients.

    The nodes are equidistant: for functions with poles near the axis, such as tanh, the trapezoidal rule under the Gaussian
    density converges exponentially in their number, a Gauss-Hermite rule only in its root.

    Example:
        >>> x, projection = hermite_projection(4)
        >>> (x**2 @ projection).round(12).tolist()
        [1.0, -0.0, 1.414213562373, 0.0]
    """
    x = np.linspace(-_REACH, _REACH, max(96, 2 * terms) + 1)
    density = np.exp(-(x**2) / 2)
    # The recurrence of he_n sqrt(density) stays of order one where he_n alone would overflow.
    columns = [np.sqrt(density / density.sum())]
    for n in range(terms - 1):
        before = columns[n - 1] * n**0.5 if n else 0.0
        columns.append((x * columns[n] - before) / (n + 1) ** 0.5)
    scaled = np.stack(columns, axis=1)
    return x, scaled[:, :1] * scaled


def moments_by_series(
    function: SquaredDifference, mean: Float[np.ndarray, " n"], covariance: Float[np.ndarray, "n n"], terms: int
) -> Moments:
    """Expectations of ``weight (sum_k sign_k sigma(y_k))^2`` under ``N(mean, covariance)``, with a PSD covariance.

    Cost: ``n`` projections of ``2 terms^2`` products, and ``n^2 terms`` for the pairs.

    Source: Mehler's formula.
    """
    x, projection = hermite_projection(terms)
    spread = np.sqrt(np.maximum(covariance.diagonal(), 0))
    y = torch.from_numpy(mean[:, None] + spread[:, None] * x)
    sigma = function.activation
    values = np.concatenate([part(y).detach().numpy() for part in (sigma.function, sigma.first, sigma.second)])
    signs = np.array(function.signs, dtype=float)
    coefficients = (values @ projection).reshape(3, len(signs), terms) * signs[:, None]
    output, slope = coefficients[0], coefficients[1]
    scale = spread[:, None] * spread
    correlation = np.divide(covariance, scale, out=np.zeros_like(scale), where=scale > 0)
    # A covariance that is PSD but for rounding may exceed one by as much.
    powers = np.minimum(np.maximum(correlation, -1), 1)[:, :, None] ** np.arange(terms)
    # The series of the residual as each feature sees it, for its expectation with sigma, sigma', sigma'' of that feature.
    residual = (powers * output).sum(1)
    with_residual = function.weight * (coefficients * residual).sum(-1)
    hessian = 2 * function.weight * (powers * slope[:, None] * slope).sum(-1)
    hessian.flat[:: len(signs) + 1] += 2 * with_residual[2]
    return Moments(float(with_residual[0].sum()), 2 * with_residual[1], hessian)


def series_for(
    function: SquaredDifference, size: float, shifted: bool, features: int, tol: float
) -> tuple[int | None, float]:
    """Terms for features of variances up to ``size``, and the error: see `specgrad.aim.quadrature.agreeing`."""
    covariance = size * (0.5 * np.eye(features) + 0.5)
    mean = np.full(features, size**0.5) if shifted else np.zeros(features)
    return agreeing(lambda terms: moments_by_series(function, mean, covariance, terms).hessian, SERIES, tol)
