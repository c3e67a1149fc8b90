"""What is compared: order parameters, moments of words, spectra; the same columns from theory and from simulation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Columns = dict[str, np.ndarray]


def order_columns(
    traces: Float[np.ndarray, "*times k"],
    psi: Float[np.ndarray, "*times k k"],
    omega: Float[np.ndarray, "*times k k"] | None = None,
) -> Columns:
    """Named columns of order parameters; indices count from 1, students first.

    Args:
        traces: ``t_k = tr(S_k)``.
        psi: ``tr(S_k S_l)``, which is q for symmetric matrices.
        omega: ``tr(S_k S_l^T)`` for direct attention; None for tied.

    Returns:
        ``t1``, ..., and ``q11``, ``q12``, ... with traceless parts ``p11``, ... (``p_kl = q_kl - t_k t_l``) if tied;
        ``Omega11``, ``Psi11``, ... with ``pOmega11``, ``pPsi11``, ... if direct.
    """
    indices = traces.shape[-1]
    columns = {f"t{k + 1}": traces[..., k] for k in range(indices)}
    matrices = {"q": psi} if omega is None else {"Omega": omega, "Psi": psi}
    pairs = [(k, m) for k in range(indices) for m in range(k, indices)]
    for name, matrix in matrices.items():
        columns |= {f"{name}{k + 1}{m + 1}": matrix[..., k, m] for k, m in pairs}
    for name, matrix in matrices.items():
        centred = "p" if name == "q" else f"p{name}"
        columns |= {f"{centred}{k + 1}{m + 1}": matrix[..., k, m] - traces[..., k] * traces[..., m] for k, m in pairs}
    return columns


def overlap(columns: dict[str, Any], teacher: int = 2) -> Float[np.ndarray, "*times"]:
    """How much of a teacher the first student has, ``p_1m/p_mm`` of the traceless parts: 0 uninformed, 1 recovered.

    Args:
        columns: with ``p`` for tied attention, ``pOmega`` for direct.
        teacher: index m of the teacher, from 1.
    """
    name = "p" if f"p1{teacher}" in columns else "pOmega"
    shared, whole = (np.asarray(columns[f"{name}{i}{teacher}"], dtype=float) for i in (1, teacher))
    return np.asarray(np.divide(shared, whole, out=np.full_like(shared, np.nan), where=whole != 0))


def correlation(columns: dict[str, Any]) -> Float[np.ndarray, "*times"]:
    """Cosine between the traceless parts of the first two matrices, ``p12/sqrt(p11 p22)``; 0 where one of them is 0."""
    name = "p" if "p12" in columns else "pOmega"
    p11, p12, p22 = (np.asarray(columns[f"{name}{ij}"], dtype=float) for ij in ("11", "12", "22"))
    norm = np.sqrt(np.maximum(p11 * p22, 0))
    return np.asarray(np.divide(p12, norm, out=np.zeros_like(p12), where=norm > 0))


def measure_matrices(
    matrices: Sequence[Float[Tensor, "dim dim"]],
) -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, "k k"], Float[np.ndarray, "k k"]]:
    """Traces, Psi and Omega of matrices, with normalised traces, float64.

    Example:
        >>> t, psi, omega = measure_matrices([torch.eye(3), torch.diag(torch.tensor([1.0, 2.0, 3.0]))])
        >>> t.tolist(), psi[0].tolist()
        ([1.0, 2.0], [1.0, 2.0])
    """
    stack = torch.stack([m.double() for m in matrices])
    dim = stack.shape[-1]
    traces = stack.diagonal(dim1=-2, dim2=-1).sum(-1) / dim
    flat, flipped = stack.flatten(1), stack.mT.flatten(1)
    return traces.cpu().numpy(), (flat @ flipped.T / dim).cpu().numpy(), (flat @ flat.T / dim).cpu().numpy()


def word_moment(matrices: Sequence[Float[Tensor, "dim dim"]], word: Sequence[int]) -> float:
    """Normalised trace of a product, ``tr(S_k1 S_k2 ...)``.

    Args:
        matrices: the S.
        word: indices of the factors, counted from 1 as in column names: (1, 1, 2) is ``tr(S_1^2 S_2)``.

    Raises:
        ValueError: for an empty word or a letter that names no matrix.
    """
    if not word or not all(1 <= k <= len(matrices) for k in word):
        raise ValueError(f"`word` must list indices from 1 to {len(matrices)}; got {tuple(word)}.")
    product = matrices[word[0] - 1].double()
    for k in word[1:]:
        product = product @ matrices[k - 1].double()
    return float(product.diagonal().sum()) / product.shape[0]


def word_name(word: Sequence[int]) -> str:
    """Column name of a word: ``mu112`` for (1, 1, 2)."""
    return "mu" + "".join(str(k) for k in word)


def records(columns: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    """Rows of a solution or a simulation, one per time (and seed), so that theory and simulation join on ``t``.

    Args:
        columns: as `specgrad.aim.solve` or `specgrad.aim.simulate` return them.
        settings: further columns, the same in every row.
    """
    times = np.asarray(columns["t"])
    kept = {
        name: np.asarray(values)
        for name, values in columns.items()
        if name != "seeds"
        and isinstance(values, np.ndarray)
        and values.dtype.kind in "fi"
        and values.shape[-1:] == times.shape
    }
    seeds = columns.get("seeds")
    if seeds is None:
        return [settings | {name: values[i].item() for name, values in kept.items()} for i in range(len(times))]
    rows = []
    for place, seed in enumerate(seeds):
        for i in range(len(times)):
            cells = {name: (v[place, i] if v.ndim == 2 else v[i]).item() for name, v in kept.items() if v.ndim <= 2}
            rows.append(settings | {"seed": int(seed)} | cells)
    return rows
