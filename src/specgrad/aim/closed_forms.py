"""Expectations of ``(sigma(z1) - sigma(z2))^2`` for the first three Hermite polynomials, in closed form.

With centred Gaussian ``z`` of covariance v. The Hessian's expectation follows from ``dE f = 1/2 <E Hess f, dv>``:
``H11 = 2 dE/dv11``, and ``H12 = dE/dv12`` where v12 is the single symmetric variable.
"""

import numpy as np

from specgrad.aim.losses import FeatureFunction, SquaredDifference
from specgrad.aim.quadrature import Moments

CLOSED_FORMS = ("h1", "h2", "h3")


def closed_form(function: FeatureFunction) -> str | None:
    """Name of the closed form that applies, or None."""
    if isinstance(function, SquaredDifference) and function.signs == (1, -1) and function.weight == 1:
        name = function.activation.name
        return name if name in CLOSED_FORMS and function.degree is not None else None
    return None


def closed_moments(name: str, v11: float, v12: float, v22: float) -> Moments:
    """Value and Hessian's expectation at covariance v.

    Example:
        >>> closed_moments("h2", 1.0, 0.0, 1.0).value
        2.0

    Source: attention-indexed models, section 3.2; Isserlis' theorem.
    """
    if name == "h1":
        value, h11, h22, h12 = v11 + v22 - 2 * v12, 2.0, 2.0, -2.0
    elif name == "h2":
        value = (3 * v11**2 + 3 * v22**2 - 2 * v11 * v22 - 4 * v12**2) / 2
        h11, h22, h12 = 6 * v11 - 2 * v22, 6 * v22 - 2 * v11, -4 * v12
    else:
        cross = (6 * v12**3 + 9 * v11 * v22 * v12 - 9 * v11 * v12 - 9 * v22 * v12 + 9 * v12) / 6
        value = sum((15 * v**3 - 18 * v**2 + 9 * v) / 6 for v in (v11, v22)) - 2 * cross
        h11 = (45 * v11**2 - 36 * v11 + 9) / 3 - 6 * (v22 - 1) * v12
        h22 = (45 * v22**2 - 36 * v22 + 9) / 3 - 6 * (v11 - 1) * v12
        h12 = -(18 * v12**2 + 9 * v11 * v22 - 9 * v11 - 9 * v22 + 9) / 3
    return Moments(value, np.zeros(2), np.array([[h11, h12], [h12, h22]]))
