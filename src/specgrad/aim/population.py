"""The population loss at finite dimension against its Gaussian limit, with the first corrections."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, product

import numpy as np
import torch
from jaxtyping import Float
from numpy.polynomial.hermite_e import hermeval
from torch import Tensor

from specgrad.aim.cumulants import feature_forms, fourth_cumulants, third_cumulants
from specgrad.aim.observables import measure_matrices
from specgrad.aim.potential import Potential
from specgrad.aim.quadrature import gauss_hermite, square_root
from specgrad.runs.seeds import stream

# Hermite polynomials of degree 6 beside a loss of moderate growth.
_NODES = {1: 96, 2: 64, 3: 32, 4: 16}

# Gigabytes stay out of reach: samples of one batch times tokens times dim.
_BATCH_ELEMENTS = 4_000_000


@dataclass(frozen=True)
class Gap:
    """Population loss of given matrices at finite d, and what the limit says.

    Attributes:
        finite: Monte Carlo estimate of ``E_x L``.
        error: its standard error.
        limit: ``E L(G)`` at the same order parameters.
        third: correction by third cumulants, ``O(d^-1/2)``.
        fourth: correction by fourth cumulants and by pairs of third ones, ``O(1/d)``.
    """

    finite: float
    error: float
    limit: float
    third: float
    fourth: float

    @property
    def gap(self) -> float:
        """``finite - limit``."""
        return self.finite - self.limit


def population_gap(
    potential: Potential,
    matrices: Sequence[Float[Tensor, "d d"]],
    *,
    samples: int = 100_000,
    seed: int = 0,
    centred: bool = True,
) -> Gap:
    """Population loss of given S against its Gaussian limit at their order parameters.

    Monte Carlo over tokens, with polynomials of the scores whose means are known exactly as control variates. The
    corrections are, for each term f of the loss, ``1/6 sum kappa_abc E d_abc f + 1/24 sum kappa_abcd E d_abcd f`` and
    ``1/72 sum kappa_abc kappa_def E d_abcdef f``.

    Args:
        potential: the loss and C.
        matrices: one S per index, equal for every pair of tokens.
        samples: number of samples.
        seed: seed of the samples.
        centred: subtract ``C_ij Tr S_k`` from the scores; False is the plain variant, of mean ``C_ij Tr(S_k)/sqrt(d)``.

    Raises:
        ValueError: for a number of matrices that does not fit, fewer than 1000 samples, or terms of more than four features.

    Example:
        >>> from specgrad.aim import Task
        >>> matrices = Task(dim=50, activation="tanh").matrices()
        >>> gap = population_gap(Potential("tanh"), matrices, samples=20_000)
        >>> abs(gap.gap - gap.fourth) < 4 * gap.error + 0.3 / 50
        True

    Source: attention-indexed models, Theorem 1 and appendix C; the corrections are Edgeworth's expansion.
    """
    if len(matrices) != potential.indices:
        raise ValueError(f"`matrices` must be {potential.indices}, one per index; got {len(matrices)}.")
    if samples < 1000:
        raise ValueError(f"`samples` must be >= 1000; got {samples}.")
    traces, psi, omega = measure_matrices(matrices)
    dim = matrices[0].shape[-1]
    mean = None if centred else traces * dim**0.5
    limit = potential.value(psi, omega, mean)
    third, fourth = _corrections(potential, matrices, psi, omega, mean)
    finite, error = _monte_carlo(potential, matrices, samples, seed, centred)
    return Gap(finite, error, limit, third, fourth)


def _corrections(
    potential: Potential,
    matrices: Sequence[Float[Tensor, "d d"]],
    psi: Float[np.ndarray, "k k"],
    omega: Float[np.ndarray, "k k"],
    mean: Float[np.ndarray, " k"] | None,
) -> tuple[float, float]:
    """Third- and fourth-order terms, summed over the loss's terms."""
    third = fourth = 0.0
    for term, group in zip(potential.scores.terms, potential.term_groups, strict=True):
        n = len(term.features)
        if n not in _NODES:
            raise ValueError(f"Corrections need terms of at most four features; got {n}.")
        forms = feature_forms(term.features, matrices, potential.token_covariance)
        kappa3, kappa4 = third_cumulants(forms), fourth_cumulants(forms)
        sigma = (group.along @ omega.ravel() + group.across @ psi.ravel()).reshape(n, n)
        centre = np.zeros(n) if mean is None else group.means @ mean
        values, vectors = np.linalg.eigh(sigma)
        kept = values > 1e-10 * values[-1]
        white = vectors[:, kept] / np.sqrt(values[kept])
        kappa3 = np.einsum("abc,ax,by,cz->xyz", kappa3, white, white, white)
        kappa4 = np.einsum("abcd,ax,by,cz,dw->xyzw", kappa4, white, white, white, white)
        root = vectors[:, kept] * np.sqrt(values[kept])
        z, w = gauss_hermite(_NODES[int(kept.sum())], int(kept.sum()))
        f = term.function.value(torch.from_numpy(centre) + z @ torch.from_numpy(root.T.copy())).numpy()
        pairs = np.multiply.outer(kappa3, kappa3)
        third += _hermite_expectation(kappa3, z.numpy(), w.numpy() * f) / 6
        fourth += _hermite_expectation(kappa4, z.numpy(), w.numpy() * f) / 24
        fourth += _hermite_expectation(pairs, z.numpy(), w.numpy() * f) / 72
    return third, fourth


def _hermite_expectation(
    coefficients: np.ndarray, z: Float[np.ndarray, "points n"], weighted: Float[np.ndarray, " points"]
) -> float:
    """``sum coefficients_a.. E f(z) He_a..(z)``, which is ``sum coefficients_a.. E d_a.. f`` in whitened variables."""
    n, order = z.shape[1], coefficients.ndim
    by_degrees: dict[tuple[int, ...], float] = {}
    for indices in product(range(n), repeat=order):
        degrees = tuple(indices.count(i) for i in range(n))
        by_degrees[degrees] = by_degrees.get(degrees, 0.0) + float(coefficients[indices])
    hermite = [[hermeval(z[:, i], np.eye(order + 1)[degree]) for degree in range(order + 1)] for i in range(n)]
    total = 0.0
    for degrees, coefficient in by_degrees.items():
        polynomial = np.ones(len(z))
        for i, degree in enumerate(degrees):
            polynomial = polynomial * hermite[i][degree]
        total += coefficient * float(weighted @ polynomial)
    return total


def _monte_carlo(
    potential: Potential, matrices: Sequence[Float[Tensor, "d d"]], samples: int, seed: int, centred: bool
) -> tuple[float, float]:
    """Mean loss and its standard error, with control variates."""
    stack = torch.stack([m.double() for m in matrices])
    tokens, dim = potential.tokens, stack.shape[-1]
    root = torch.from_numpy(square_root(potential.token_covariance))
    c = torch.from_numpy(potential.token_covariance)
    centring = c[:, :, None] * stack.diagonal(dim1=1, dim2=2).sum(1)
    generator = stream(seed, "population")
    batch = max(1, min(samples, _BATCH_ELEMENTS // (tokens * dim)))
    losses, scores = [], []
    for begin in range(0, samples, batch):
        count = min(batch, samples - begin)
        x = root @ torch.randn(count, tokens, dim, generator=generator, dtype=torch.float64)
        raw = torch.stack([torch.matmul((x.reshape(-1, dim) @ s).view_as(x), x.mT) for s in stack], dim=-1)
        # Controls need centred scores; the loss sees the plain ones if asked for.
        centred_scores = (raw - centring) / dim**0.5
        losses.append(potential.scores.function(centred_scores if centred else raw / dim**0.5))
        scores.append(centred_scores.reshape(count, -1))
    loss, g = torch.cat(losses).numpy(), torch.cat(scores).numpy()
    controls = _controls(potential, matrices, g)
    design = np.column_stack([np.ones(samples), controls])
    solution, *_ = np.linalg.lstsq(design, loss, rcond=1e-12)
    residual = loss - design @ solution
    return float(solution[0]), float(residual.std() / np.sqrt(samples - design.shape[1]))


def _controls(
    potential: Potential, matrices: Sequence[Float[Tensor, "d d"]], g: Float[np.ndarray, "samples n"]
) -> Float[np.ndarray, "samples m"]:
    """Monomials of centred scores minus their exact means: up to degree 4 for few scores, 2 for many."""
    n = g.shape[1]
    features = np.eye(n).reshape(n, potential.tokens, potential.tokens, potential.indices)
    forms = feature_forms(features, matrices, potential.token_covariance)
    flat = forms.reshape(n, -1)
    sigma = 2 * (flat @ forms.mT.reshape(n, -1).T).numpy()
    columns = [g]
    pairs = list(combinations_with_replacement(range(n), 2))
    columns.append(np.column_stack([g[:, a] * g[:, b] - sigma[a, b] for a, b in pairs]))
    if n <= 3:
        kappa3, kappa4 = third_cumulants(forms), fourth_cumulants(forms)
        for word in combinations_with_replacement(range(n), 3):
            columns.append((g[:, word].prod(axis=1) - kappa3[word])[:, None])
        for a, b, c, d in combinations_with_replacement(range(n), 4):
            gaussian = sigma[a, b] * sigma[c, d] + sigma[a, c] * sigma[b, d] + sigma[a, d] * sigma[b, c]
            columns.append((g[:, (a, b, c, d)].prod(axis=1) - gaussian - kappa4[a, b, c, d])[:, None])
    return np.column_stack(columns)
