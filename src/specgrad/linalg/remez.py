"""Odd polynomials that map singular values to 1: Remez exchange, optimal compositions and the classical sets.

An odd polynomial acts on a matrix through its singular values, ``p(X) = U p(S) V^T``, and needs products only. The
minimax polynomial of a degree is closest to 1 on an interval ``[lo, up]``; composing minimax polynomials, each fitted to
the interval the previous one leaves, is the best composition of those degrees. Not to be confused with the classical
sets at the end of this file, which repeat one fixed polynomial whatever the interval.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
from jaxtyping import Float
from numpy.polynomial import Chebyshev, Polynomial
from numpy.polynomial.chebyshev import chebvander

# The exchange converges quadratically, from Chebyshev points in about five rounds for any interval; the excess of the
# largest deviation over the levelled one then stands at the rounding of the linear solve.
_TOLERANCE = 1e-14
_ROUNDS = 50

# Where the Taylor polynomial at 1 is this close to 1 on the whole interval, the minimax polynomial equals it to
# rounding, and its alternation can no longer be seen in float64.
_INVISIBLE = 1e-14

# Beyond this degree the coefficients of wide intervals run into the thousands, and evaluating the polynomial, even in
# float64, loses the digits that the exchange has found.
_LARGEST_DEGREE = 9


@dataclass(frozen=True)
class OddPolynomial:
    """The polynomial ``c_0 x + c_1 x^3 + ... + c_{k-1} x^(2k-1)``, of degree ``2k - 1``.

    Attributes:
        coefficients: ``c_0`` to ``c_{k-1}``, at least two of them.
        error: largest distance to 1 on the interval it was fitted to; None for the classical sets, which have none.
    """

    coefficients: tuple[float, ...]
    error: float | None = None

    def __post_init__(self) -> None:
        if len(self.coefficients) < 2:
            raise ValueError(
                f"`coefficients` of `OddPolynomial` must be at least two numbers (degree 3); got {self.coefficients}."
            )

    def __call__(self, x: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """Evaluates the polynomial at singular values ``x``."""
        return np.asarray(x * Polynomial(self.coefficients)(x * x))


@lru_cache(maxsize=256)
def minimax_odd(degree: int, lo: float, up: float) -> OddPolynomial:
    """Best odd approximation of 1 on an interval.

    ``argmin_p max_{lo <= x <= up} |1 - p(x)|`` over odd p of the given degree, by the Remez exchange: the deviation
    takes its largest size with alternating sign at ``k + 1`` points for degree ``2k - 1``.

    Args:
        degree: odd, 3 to 9.
        lo: left end of the interval, > 0.
        up: right end, > ``lo``.

    Returns:
        The polynomial with its error.

    Raises:
        ValueError: if ``degree`` is even or outside its range, or the ends are not ``0 < lo < up < inf``.
        ArithmeticError: if the exchange does not level the deviation.

    Cost: about five linear systems of ``k + 1`` unknowns; cached.

    Example:
        >>> p = minimax_odd(3, 0.5, 1.0)
        >>> [round(c, 4) for c in p.coefficients], round(p.error, 4)
        ([2.1328, -1.2187], 0.086)

    Source: Remez (1934); Trefethen, Approximation Theory and Approximation Practice (2013), chapter 10.
    """
    if degree % 2 == 0 or not 3 <= degree <= _LARGEST_DEGREE:
        raise ValueError(f"`degree` of `minimax_odd` must be an odd number from 3 to {_LARGEST_DEGREE}; got {degree}.")
    if not 0 < lo < up < np.inf:
        raise ValueError(f"`lo` and `up` of `minimax_odd` must satisfy 0 < lo < up < inf; got {lo} and {up}.")
    # Centred on 1, where narrow intervals have a limit that is known in closed form.
    centre = (lo + up) / 2
    fitted, error = _exchange((degree + 1) // 2, lo / centre, up / centre)
    return OddPolynomial(tuple(float(c / centre ** (2 * j + 1)) for j, c in enumerate(fitted)), error)


def _exchange(terms: int, lo: float, up: float) -> tuple[Float[np.ndarray, " k"], float]:
    """Coefficients and error of the minimax polynomial of ``terms`` terms on an interval with midpoint 1."""
    limit = _taylor(terms)
    limit_error = float(np.abs(1 - limit(np.array([lo, up]))).max())
    if limit_error <= _INVISIBLE:
        return np.asarray(limit.coefficients), limit_error
    # p(x) = x q(x^2) with q in Chebyshev polynomials of x^2: a well conditioned system on wide and narrow intervals.
    domain = [lo * lo, up * up]
    square = Chebyshev.identity(domain=domain)
    signs = (-1.0) ** np.arange(terms + 1)
    points = 1 - (up - lo) / 2 * np.cos(np.pi * np.arange(terms + 1) / terms)
    excess = np.inf
    for _ in range(_ROUNDS):
        basis = points[:, None] * chebvander(2 * (points**2 - domain[0]) / (domain[1] - domain[0]) - 1, terms - 1)
        *q_coefficients, level = np.linalg.solve(np.column_stack([basis, signs]), np.ones(terms + 1))
        q = Chebyshev(q_coefficients, domain=domain)
        # p'(x) = q(t) + 2 t q'(t) at t = x^2 has all its k-1 roots inside, between the alternation points.
        turning = np.sqrt(np.sort(np.clip((q + 2 * square * q.deriv()).roots().real, lo * lo, up * up)))
        points = np.concatenate([[lo], turning, [up]])
        excess, before = np.abs(1 - points * q(points**2)).max() - abs(level), excess
        # Rounding of the solve may leave more than the tolerance: then the excess has stopped shrinking.
        if excess <= _TOLERANCE or (excess <= 1e3 * _TOLERANCE and excess > before / 2):
            return q.convert(kind=Polynomial).coef, float(abs(level))
    raise ArithmeticError(f"Remez exchange of degree {2 * terms - 1} on [{lo}, {up}] left an excess of {excess:.1e}.")


def _taylor(terms: int) -> OddPolynomial:
    """The odd polynomial that touches 1 at 1 to order ``terms``: ``x sum_j binom(2j, j) 4^-j (1 - x^2)^j``."""
    weights = list(accumulate(range(1, terms), lambda w, j: w * (2 * j - 1) / (2 * j), initial=1.0))
    series = Polynomial(weights)(Polynomial([1.0, -1.0]))
    return OddPolynomial(tuple(map(float, series.coef)))


@lru_cache(maxsize=64)
def optimal_composition(degrees: tuple[int, ...], interval: float, safety: float = 1.0) -> tuple[OddPolynomial, ...]:
    """Polynomials whose composition is closest to 1 on ``[interval, 1]``.

    ``p_i`` is minimax on ``[lo_i, safety up_i]`` and ``[lo_{i+1}, up_{i+1}] = [1 - E_i, 1 + E_i]``: greedy is optimal.

    Args:
        degrees: odd degree of each step, in the order of application.
        interval: left end of the fitted interval, in (0, 1).
        safety: factor >= 1 on each right end. Rounding pushes singular values over the right end, where a polynomial
            grows without bound, so half precision needs some percent; float64 needs none.

    Returns:
        The polynomials. The error of the composition is that of the last one.

    Raises:
        ValueError: if ``degrees`` is empty or holds a degree `minimax_odd` refuses, ``interval`` is outside (0, 1), or
            ``safety`` is below 1.

    Cost: one `minimax_odd` per step; cached.

    Example:
        >>> steps = optimal_composition((5, 5, 5, 5), 5e-3, safety=1.02)
        >>> [round(c, 3) for c in steps[0].coefficients], round(steps[-1].error, 3)
        ([8.14, -23.037, 16.397], 0.098)

    Source: Amsel, Persson, Musco and Gower, The Polar Express (arXiv 2505.16932), theorem 3.1; Nakatsukasa and Freund,
    SIAM Review 58 (2016), for the rational case.
    """
    if not degrees:
        raise ValueError("`degrees` of `optimal_composition` must name at least one step; got ().")
    if not 0 < interval < 1:
        raise ValueError(f"`interval` of `optimal_composition` must lie strictly between 0 and 1; got {interval}.")
    if not 1 <= safety < np.inf:
        raise ValueError(f"`safety` of `optimal_composition` must be at least 1 and finite; got {safety}.")
    steps: list[OddPolynomial] = []
    lo, up = interval, 1.0
    for degree in degrees:
        step = minimax_odd(degree, lo, safety * up)
        steps.append(step)
        assert step.error is not None
        # Once the error is below rounding the interval is a point; it is kept open by one unit of rounding.
        error = max(step.error, float(np.finfo(np.float64).eps))
        lo, up = 1 - error, 1 + error
    return tuple(steps)


# Jordan et al., Muon (2024): five repetitions; chosen for its slope at 0, it leaves singular values in about [0.7, 1.2].
MUON_QUINTIC = OddPolynomial((3.4445, -4.7750, 2.0315))

# The convergent iterations, Taylor polynomials at 1: Kovarik, SIAM J. Numer. Anal. 7 (1970); Bjorck and Bowie, same
# journal 8 (1971). The cubic is the Newton-Schulz iteration.
CUBIC = _taylor(2)
QUINTIC = _taylor(3)
