"""Expectations over a few Gaussian variables: Gauss-Hermite rules, or quasi-Monte-Carlo with an error estimate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import ndtri, roots_hermitenorm
from scipy.stats import qmc
from torch import Tensor

from specgrad.aim.losses import FeatureFunction

# Nodes whose product weight is below this add less than rounding to the sums, for functions of polynomial growth.
_NEGLIGIBLE = 1e-22

# Numbers of nodes per variable that are tried one after the other, and the largest grid.
NODE_COUNTS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LARGEST_GRID = 300_000

# Grids beyond this many variables would need too few nodes per variable to be trusted.
_MOST_GRID_FEATURES = 4

# Disagreement of the two largest rules up to which they are better than sampling.
_LOOSE = 1e-4

# Quasi-Monte-Carlo: scrambled Sobol points per randomisation and randomisations, whose spread is the error estimate.
QMC_POINTS = 2**12
QMC_RANDOMISATIONS = 8


@dataclass(frozen=True)
class Moments:
    """Expectations of a feature function.

    Attributes:
        value: ``E f``.
        gradient: ``E grad f``.
        hessian: ``E Hess f``.
        value_error: standard error of ``value``; 0 for a rule that is exact to rounding.
        hessian_error: standard error of the Hessian's entries.
    """

    value: float
    gradient: Float[np.ndarray, " n"]
    hessian: Float[np.ndarray, "n n"]
    value_error: float = 0.0
    hessian_error: Float[np.ndarray, "n n"] | float = 0.0


@lru_cache(maxsize=64)
def gauss_hermite(nodes: int, dim: int) -> tuple[Float[Tensor, "points dim"], Float[Tensor, " points"]]:
    """Product rule for the standard Gaussian in ``dim`` variables, without points of negligible weight.

    Example:
        >>> points, weights = gauss_hermite(4, 2)
        >>> round(float(weights @ points[:, 0] ** 6), 12)
        15.0
    """
    z, w = roots_hermitenorm(nodes)
    w = w / w.sum()
    grids = np.meshgrid(*[z] * dim, indexing="ij")
    weights = np.ones([nodes] * dim)
    for axis in range(dim):
        weights = weights * w.reshape([-1 if a == axis else 1 for a in range(dim)])
    keep = weights > _NEGLIGIBLE
    return torch.from_numpy(np.stack([g[keep] for g in grids], axis=1)), torch.from_numpy(weights[keep])


@lru_cache(maxsize=4)
def sobol_points(dim: int, seed: int) -> Float[Tensor, "randomisations points dim"]:
    """Scrambled Sobol points mapped to standard Gaussian ones, one set per randomisation."""
    sets = []
    for randomisation in range(QMC_RANDOMISATIONS):
        generator = np.random.default_rng([seed, randomisation])
        uniform = qmc.Sobol(dim, rng=generator).random(QMC_POINTS)
        sets.append(ndtri(np.clip(uniform, 1e-16, 1 - 1e-16)))
    return torch.from_numpy(np.stack(sets))


def check_covariance(covariance: Float[np.ndarray, "n n"]) -> None:
    """Refuses what is no covariance.

    Raises:
        ValueError: for a matrix that is not PSD, beyond rounding, or not finite.
    """
    if not np.isfinite(covariance).all():
        raise ValueError("the covariance of the scores must be finite; the order parameters have diverged.")
    values = np.linalg.eigvalsh((covariance + covariance.T) / 2)
    if values[0] < -1e-9 * max(values[-1], 1e-300):
        raise ValueError(
            "the order parameters must give a PSD covariance of the scores; "
            f"got eigenvalues from {values[0]:.3g} to {values[-1]:.3g}."
        )


def square_root(covariance: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """Symmetric square root of a PSD matrix; rounding noise below zero counts as zero.

    Raises:
        ValueError: for a matrix that is not PSD or not finite.
    """
    check_covariance(covariance)
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    root: Float[np.ndarray, "n n"] = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    return root


def moments_on_grid(
    function: FeatureFunction, mean: Float[np.ndarray, " n"], root: Float[np.ndarray, "n n"], nodes: int
) -> Moments:
    """Gauss-Hermite expectations under ``N(mean, root root^T)``."""
    z, w = gauss_hermite(nodes, len(mean))
    y = torch.from_numpy(mean) + z @ torch.from_numpy(np.ascontiguousarray(root.T))
    value, gradient, hessian = function.derivatives(y)
    return Moments(float(w @ value), (w @ gradient).numpy(), torch.tensordot(w, hessian, dims=1).numpy())


def agreeing(
    hessian: Callable[[int], Float[np.ndarray, "n n"] | None], counts: Sequence[int], tol: float
) -> tuple[int | None, float]:
    """The least number of nodes whose Hessian agrees with that of the next larger number, and 0.

    Where none does, the largest affordable number with its distance to the one before, or None if sampling beats that.

    Args:
        hessian: its expectation with so many nodes; None where they are too many.
        counts: numbers of nodes, ascending.
        tol: relative agreement.
    """
    before, last, distance = None, None, np.inf
    for nodes in counts:
        now = hessian(nodes)
        if now is None:
            break
        if before is not None:
            distance = float(np.abs(now - before).max()) / (1 + float(np.abs(now).max()))
            if distance <= tol:
                return last, 0.0
        before, last = now, nodes
    return (last, distance) if distance <= _LOOSE else (None, 0.0)


def grid_for(function: FeatureFunction, size: float, shifted: bool, features: int, tol: float) -> tuple[int | None, float]:
    """Nodes per variable of a product grid, and its error: see `agreeing`.

    Args:
        function: what is integrated.
        size: largest eigenvalue of the features' covariance.
        shifted: whether means of that size must be covered.
        features: their number.
        tol: relative agreement.
    """
    root = square_root(size * (0.5 * np.eye(features) + 0.5 / features))
    mean = np.full(features, (size / features) ** 0.5) if shifted else np.zeros(features)

    def hessian(nodes: int) -> Float[np.ndarray, "n n"] | None:
        if features > _MOST_GRID_FEATURES or len(gauss_hermite(nodes, features)[1]) > LARGEST_GRID:
            return None
        return moments_on_grid(function, mean, root, nodes).hessian

    return agreeing(hessian, NODE_COUNTS, tol)


def moments_by_sampling(
    function: FeatureFunction, mean: Float[np.ndarray, " n"], root: Float[np.ndarray, "n n"], seed: int
) -> Moments:
    """Quasi-Monte-Carlo expectations; the same points for every covariance, so that they are smooth in it."""
    sets = []
    for z in sobol_points(len(mean), seed):
        y = torch.from_numpy(mean) + z @ torch.from_numpy(np.ascontiguousarray(root.T))
        sets.append([part.mean(0).numpy() for part in function.derivatives(y)])
    values, gradients, hessians = (np.stack(parts) for parts in zip(*sets, strict=True))
    scale = np.sqrt(len(values))
    return Moments(
        float(values.mean()), gradients.mean(0), hessians.mean(0),
        float(values.std(ddof=1) / scale), hessians.std(0, ddof=1) / scale,
    )  # fmt: skip
