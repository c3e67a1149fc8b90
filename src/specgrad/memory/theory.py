"""What is predicted: capacities, critical batches, step sizes, losses and spectra, up to constants and powers of log d.

Statements are of Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554) unless a docstring says otherwise. Functions named
``..._exponent`` are exact; the others set unknown constants to 1. `CONJECTURES` lists what the paper does not prove.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import gamma, zeta
from torch import Tensor

Kind = Literal["gd", "muon", "h_lambda", "newton"]

CONJECTURES = (
    "Muon with the exact softmax gradient follows the rates of the thresholded dynamics (the conjecture of section 5.2).",
    "Muon matches Newton's method at every step (ibid.).",
    "Over long horizons capacity is min(d^2, (T B)^(1/alpha)) (section 5.2).",
)


def capacity_exponent(update: Kind, alpha: float | int, steps: int = 1) -> float:
    """Exponent e of the population capacity ``d^e``.

    One step: ``1 + 1/(2 alpha)`` for Muon (any resolution up to ``d^-alpha``) and Newton, ``1/(2 alpha)`` for gradient
    descent. More steps, of the thresholded dynamics: ``2 - (1 - 1/(2 alpha))^t`` for Muon; gradient descent gains
    ``1/(2 alpha)`` a step until it reaches 1 and then follows Muon's recursion.

    Example:
        >>> [round(capacity_exponent("muon", 1.5, t), 3) for t in (1, 2, 3, 4)]
        [1.333, 1.556, 1.704, 1.802]
        >>> [round(capacity_exponent("gd", 1.5, t), 3) for t in (1, 2, 3, 4)]
        [0.333, 0.667, 1.0, 1.333]

    Source: Theorems 4.1, 4.3, 4.4, 5.4 and 5.5.
    """
    _check(alpha)
    if steps < 1:
        raise ValueError(f"`steps` of `memory.theory.capacity_exponent` must be >= 1; got {steps}.")
    gain = 1 / (2 * alpha)
    _check_update("capacity_exponent", update)
    if update != "gd":
        return float(2 - (1 - gain) ** steps)
    exponent = 0.0
    for _ in range(steps):
        # Below d the gradient of one item drowns the next; from d on both methods obey d' = d^(1/alpha) d_t^(1-1/(2 alpha)).
        exponent = exponent + gain if exponent < 1 - 1e-12 else 2 * gain + exponent * (1 - gain)
    return exponent


def capacity(update: Kind, dim: int, alpha: float | int, batch_size: float | int | None = None, steps: int = 1) -> float:
    """Order of the number of recovered items, ``min(d^e, B^(1/alpha))``; ``batch_size`` None is the population.

    Source: Theorems 4.1, 4.3, 4.4, 5.4 and 5.5.
    """
    if not (dim >= 1 and (batch_size is None or batch_size >= 1)):
        raise ValueError(f"`dim` and `batch_size` of `memory.theory` must be >= 1; got {dim} and {batch_size}.")
    population = float(dim ** capacity_exponent(update, alpha, steps))
    return population if batch_size is None else min(population, float(batch_size ** (1 / alpha)))


def upper_bound_gd(dim: int, alpha: float | int, batch_size: float | int | None = None) -> float:
    """Order of the largest item that one step of gradient descent can recover, with the proof's logarithms.

    ``min(d^(1/(2 alpha)) (log d)^(1 + 1/alpha), B^(1/alpha))``.

    Source: Theorem 4.3 and its proof.
    """
    _check(alpha)
    population = float(dim ** (1 / (2 * alpha)) * math.log(dim) ** (1 + 1 / alpha))
    return population if batch_size is None else min(population, float(batch_size ** (1 / alpha)))


def critical_batch_exponent(update: Kind, alpha: float | int) -> float:
    """Exponent of the batch size beyond which one step gains nothing: ``alpha + 1/2``, or 1/2 for gradient descent.

    Example:
        >>> critical_batch_exponent("muon", 1.5), critical_batch_exponent("gd", 1.5)
        (2.0, 0.5)

    Source: Theorems 4.1 and 4.3, from ``B^(1/alpha) = d^e``.
    """
    return alpha * capacity_exponent(update, alpha)


def critical_batch(update: Kind, dim: int, alpha: float | int) -> float:
    """Order of the critical batch size, ``d`` to the `critical_batch_exponent`."""
    return float(dim ** critical_batch_exponent(update, alpha))


def smallest_newton_batch(dim: int, alpha: float | int) -> float:
    """Order of the batch that makes Newton's Hessian regular, ``d^alpha``: as many distinct items as dimensions.

    Source: Theorem 4.4.
    """
    _check(alpha)
    return float(dim**alpha)


def learning_rate(update: Kind, dim: int) -> float:
    """Order of the learning rate of one step: ``sqrt(d)`` for Muon, ``1/sqrt(d)`` for Newton, any (here 1) for gd.

    Source: Theorems 4.1, 4.3 and 4.4.
    """
    _check_update("learning_rate", update)
    return {"gd": 1.0, "newton": float(dim**-0.5)}.get(update, float(dim**0.5))


def gd_schedule(dim: int, alpha: float | int, steps: int, constant: float | int = 1.0) -> list[float]:
    """Learning rates ``constant d_{t+1}^alpha`` under which gradient descent follows its recursion.

    The next item to be learned then moves by order one. Numerically unstable for large alpha, as the paper warns.

    Source: Theorem 5.5.
    """
    return [constant * dim ** (alpha * capacity_exponent("gd", alpha, t)) for t in range(1, steps + 1)]


def resolution(dim: int, alpha: float | int, batch_size: float | int | None = None, constant: float | int = 0.1) -> float:
    """The regularisation lambda, ``constant max(d^-alpha, 1/B)``.

    The theorem's logarithms, ``max((log d)^(2 alpha + 2) d^-alpha, (log d)^2 / B)``, would multiply it by thousands at
    practical sizes; capacity was measured to be flat below 0.1 ``d^-alpha``.

    Example:
        >>> round(resolution(100, 1.5), 6)
        0.0001

    Source: Theorem 4.1 for the orders; the constant is measured.
    """
    _check(alpha)
    return constant * max(float(dim**-alpha), 0.0 if batch_size is None else 1 / batch_size)


def resolution_of_step(dim: int, alpha: float | int, step: int) -> float:
    """Order of the regularisation in step t (from 0) of the thresholded dynamics, ``d_{t+1}^-alpha sqrt(d)``.

    Source: Theorem 5.4.
    """
    return float(dim ** (0.5 - alpha * capacity_exponent("muon", alpha, step + 1)))


def loss_exponent(update: Kind, alpha: float | int, steps: int = 1) -> float:
    """Exponent of the loss after the items that are not recovered, ``d^(e (1 - alpha))``.

    For one step of Muon or Newton this is ``1/(2 alpha) + 1/2 - alpha``.

    Source: Theorems 4.1 and 5.4, from ``sum_{i > d^e} p_i log N``.
    """
    return capacity_exponent(update, alpha, steps) * (1 - alpha)


def loss(update: Kind, dim: int, alpha: float | int, batch_size: float | int | None = None, steps: int = 1) -> float:
    """Order of the loss, ``capacity^(1 - alpha)``: ``max(d^(e (1 - alpha)), B^(1/alpha - 1))``.

    Example:
        >>> round(loss("muon", 256, 1.5), 4), round(loss("muon", 256, 1.5, batch_size=1000), 4)
        (0.0248, 0.1)

    Source: Theorems 4.1, 4.4 and 5.4.
    """
    return capacity(update, dim, alpha, batch_size, steps) ** (1 - alpha)


def loss_of_capacity(frequencies: Float[Tensor, " N"], recovered: int) -> float:
    """Loss if the first items are learned and the others answered uniformly, ``sum_{i > recovered} p_i log N``.

    Source: proof of Theorem 4.1.
    """
    return float(frequencies[recovered:].sum()) * math.log(len(frequencies))


def information_limit(alpha: float | int, batch_size: float | int, steps: int = 1) -> float:
    """Order of the items seen in ``steps`` batches, ``(T B)^(1/alpha)``, which nobody can exceed.

    Source: section 5.2.
    """
    _check(alpha)
    return float((steps * batch_size) ** (1 / alpha))


def expected_distinct(frequencies: Float[Tensor, " N"] | Sequence[float | int], batch_size: float | int) -> float:
    """Expected number of distinct items in a batch, ``sum_i 1 - (1 - p_i)^B``, exactly.

    Example:
        >>> expected_distinct([0.5, 0.5], 2)
        1.5
    """
    p = torch.as_tensor(frequencies, dtype=torch.float64)
    return float(-torch.expm1(batch_size * torch.log1p(-p.clamp(max=1 - 1e-16))).sum())


def asymptotic_distinct(alpha: float | int, batch_size: float | int) -> float:
    """Distinct items in a batch from infinitely many, ``Gamma(1 - 1/alpha) (B / zeta(alpha))^(1/alpha)``.

    Example:
        >>> round(asymptotic_distinct(1.5, 1.0), 3)
        1.412
    """
    _check(alpha)
    return float(gamma(1 - 1 / alpha) * (batch_size / zeta(alpha)) ** (1 / alpha))


def spectrum_exponents(alpha: float | int) -> dict[str, float]:
    """Exponents in d of the start gradient's spectrum, one item left out.

    ``smallest``: of ``s_d``; ``half``: of ``s_{d/2}``; ``inverse_sum``: of ``sum_k 1/s_k``.

    Source: Lemma 5.3.
    """
    _check(alpha)
    return {"smallest": -alpha - 1, "half": -alpha, "inverse_sum": alpha + 1}


def logit_orders(frequency: float | int, dim: int, lam: float | int) -> tuple[float, float]:
    """Orders of an item's signal ``min(q/lam, 1)`` and of the interactions ``(log d)^3 / sqrt(d)`` it competes with.

    Source: proof of Theorem 4.1.
    """
    return min(frequency / lam, 1.0), math.log(dim) ** 3 / dim**0.5


def distance_to_finite_size(dim: int, num_items: int) -> float:
    """Needed signal over largest signal, ``sqrt(2 log N / d)``: where it is near 1, exponents are overestimated. Ours."""
    return float(np.sqrt(2 * np.log(num_items) / dim))


def _check_update(function: str, update: str) -> None:
    if update not in get_args(Kind):
        raise ValueError(f"`update` of `memory.theory.{function}` must be gd, muon, h_lambda or newton; got {update!r}.")


def _check(alpha: float | int) -> None:
    if not alpha > 1:
        raise ValueError(f"`alpha` of `memory.theory` must be > 1 so that frequencies are summable; got {alpha}.")
