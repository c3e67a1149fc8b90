"""Random matrices of the lab: how they are drawn at finite dimension, and their laws in the limit."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


def gaussian_factor(
    dim: int, ratio: float, scale: float, generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "dim rank"]:
    """W with ``round(ratio dim)`` columns and independent entries ``N(0, scale/dim)``.

    Raises:
        ValueError: if the rank would be 0.
    """
    rank = round(ratio * dim)
    if rank < 1:
        raise ValueError(f"`ratio` times `dim` must give a rank >= 1; got {ratio} x {dim}.")
    entries = torch.randn(dim, rank, generator=generator, dtype=dtype, device=generator.device)
    return entries.mul_((scale / dim) ** 0.5)


def wishart_jacobi(ratio: float, scale: float, size: int) -> tuple[Float[np.ndarray, " size"], Float[np.ndarray, " last"]]:
    """Diagonal and off-diagonal of the Jacobi matrix of Marchenko and Pastur's law of ``W W^T``.

    With ``ratio = rank/dim`` and entries ``N(0, scale/dim)`` the diagonal is ``ratio scale, scale (1 + ratio), ...`` and the
    off-diagonal ``scale sqrt(ratio)``; an atom at 0 (ratio < 1) is included.
    """
    diagonal = np.full(size, scale * (1 + ratio))
    diagonal[0] = ratio * scale
    return diagonal, np.full(size - 1, scale * np.sqrt(ratio))


def wishart_nodes(ratio: float, scale: float, size: int) -> tuple[Float[np.ndarray, " nodes"], Float[np.ndarray, " nodes"]]:
    """Gauss rule of Marchenko and Pastur's law: nodes and weights, exact for moments up to ``2 size - 1``.

    Example:
        >>> nodes, weights = wishart_nodes(1.0, 1.0, 8)
        >>> [round(float(weights @ nodes**n), 10) for n in (1, 2, 3, 4)]
        [1.0, 2.0, 5.0, 14.0]

    Source: Golub and Welsch (1969); the recurrence of Marchenko and Pastur's orthogonal polynomials.
    """
    diagonal, off = wishart_jacobi(ratio, scale, size)
    nodes, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1))
    return np.maximum(nodes, 0.0), vectors[0] ** 2


def jacobi_matrix(
    law: str, ratio: float, scale: float, size: int
) -> tuple[Float[np.ndarray, " size"], Float[np.ndarray, " last"]]:
    """Diagonal and off-diagonal of the Jacobi matrix of a symmetric ensemble's limiting spectral law.

    Args:
        law: ``wishart``, ``traceless`` (Wishart minus its trace) or ``symmetric`` (semicircle of variance ``scale``).
        ratio: rank over dimension of a Wishart factor.
        scale: scale of the entries.
        size: size of the Jacobi matrix.

    Raises:
        ValueError: for a law that is not symmetric.
    """
    if law == "symmetric":
        return np.zeros(size), np.full(size - 1, scale**0.5)
    if law not in ("wishart", "traceless"):
        raise ValueError(f"`teacher` of a tied `aim.Task` must be symmetric for theory; got {law!r}.")
    diagonal, off = wishart_jacobi(ratio, scale, size)
    return (diagonal, off) if law == "wishart" else (diagonal - ratio * scale, off)


def spectral_nodes(
    law: str, ratio: float, scale: float, size: int
) -> tuple[Float[np.ndarray, " nodes"], Float[np.ndarray, " nodes"]]:
    """Gauss rule of a symmetric ensemble's limiting spectral law."""
    if law == "wishart":
        return wishart_nodes(ratio, scale, size)
    diagonal, off = jacobi_matrix(law, ratio, scale, size)
    nodes, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1))
    return nodes, vectors[0] ** 2


def wishart_edge(ratio: float, scale: float) -> float:
    """Upper edge of Marchenko and Pastur's law, ``scale (1 + sqrt(ratio))^2``."""
    return float(scale * (1 + np.sqrt(ratio)) ** 2)
