"""The start of the hierarchies: orthonormal words, the matrices' action on them, and moments.

In the space of noncommutative polynomials with inner product ``tr(a^T b)``, let P project on words of length <= m. Then
``J_k = P S_k P`` and the unit word e0 give ``tr(S_k1 ... S_kw) = e0^T J_k1 ... J_kw e0`` for all w <= 2m + 1.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from specgrad.aim.ensembles import jacobi_matrix
from specgrad.aim.task import Task

Operators = Float[np.ndarray, "k size size"]

# Directions that Gram-Schmidt leaves shorter than this share are dependent: the algebra of small matrices is exhausted.
_DEPENDENT = 1e-10

# Elements of the stack of half-words beyond which it would not fit in a gigabyte.
_LARGEST_STACK = 120_000_000


def free_operators(jacobis: Sequence[tuple[np.ndarray, np.ndarray]], order: int) -> Operators:
    """J_k of free matrices with given spectral laws, explicitly; e0 is the first unit vector.

    The basis are alternating strings ``(k1, n1)(k2, n2)...`` of total degree <= order, orthonormal polynomials of one
    matrix after another. S_k acts on a leading block of its own by its Jacobi matrix, and puts a block in front of others.

    Args:
        jacobis: diagonal and off-diagonal of each law's Jacobi matrix, at least ``order + 1`` long.
        order: largest degree m.

    Source: Voiculescu's free product; Golub and Welsch's Jacobi matrices.
    """
    strings: list[tuple[tuple[int, int], ...]] = [()]
    frontier: list[tuple[tuple[int, int], ...]] = [()]
    for _ in range(order):
        longer: list[tuple[tuple[int, int], ...]] = []
        for string in frontier:
            for k in range(len(jacobis)):
                own = bool(string) and string[0][0] == k
                longer.append(((k, string[0][1] + 1), *string[1:]) if own else ((k, 1), *string))
        frontier = longer
        strings += longer
    place = {string: i for i, string in enumerate(strings)}
    operators = np.zeros((len(jacobis), len(strings), len(strings)))
    for k, (diagonal, off) in enumerate(jacobis):
        for string, i in place.items():
            degree = string[0][1] if string and string[0][0] == k else 0
            tail = string[1:] if degree else string
            operators[k, i, i] = diagonal[degree]
            j = place.get(((k, degree + 1), *tail))
            if j is not None:
                operators[k, i, j] = operators[k, j, i] = off[degree]
    return operators


def matrix_operators(matrices: Sequence[Float[Tensor, "dim dim"]], order: int) -> Operators:
    """J_k of given symmetric matrices, by Gram-Schmidt (twice) on words; e0 is the first unit vector.

    Cost: ``(K + 1) size`` products of dim x dim matrices and ``size^2`` inner products, size up to ``2^(order+1) - 1`` for
    two matrices.
    """
    stack = torch.stack([m.double() for m in matrices])
    dim = stack.shape[-1]
    basis = torch.eye(dim, dtype=torch.float64).reshape(1, -1)
    frontier = basis
    for _ in range(order):
        fresh = []
        images = torch.einsum("kij,bjl->bkil", stack, frontier.reshape(-1, dim, dim)).reshape(-1, dim * dim)
        for image in images:
            length = image.norm()
            for _ in range(2):
                image = image - (basis @ image / dim) @ basis
            norm = image.norm()
            if norm > _DEPENDENT * length:
                fresh.append(image * (dim**0.5 / norm))
                basis = torch.cat([basis, fresh[-1][None]])
        if not fresh:
            break
        frontier = torch.stack(fresh)
    shaped = basis.reshape(-1, dim, dim)
    operators = torch.stack([basis @ (s @ shaped).reshape(-1, dim * dim).T / dim for s in stack])
    return ((operators + operators.mT) / 2).numpy()


def initial_operators(task: Task, order: int, seed: int | None = None) -> Operators:
    """J_k of a task's start: of the limiting ensembles if ``seed`` is None, else of the matrices drawn with that seed.

    Raises:
        ValueError: for direct attention, whose matrices need not be symmetric.
    """
    if task.attention != "tied":
        raise ValueError(f"Words of symmetric matrices need tied attention; got {task.attention!r}.")
    if seed is not None:
        return matrix_operators(task.matrices(seed), order)
    if task.student_matrix is not None or task.teacher_matrix is not None:
        raise ValueError("Given matrices need `seed` (any), since they have no limit d = infinity.")
    jacobis = [jacobi_matrix("wishart", r, task.student_scale, order + 1) for r in task.student_ratios]
    jacobis += [jacobi_matrix(task.teacher, r, task.teacher_scale, order + 1) for r in task.teacher_ratios]
    return free_operators(jacobis, order)


def moments_of_operators(operators: Operators, words: Sequence[Sequence[int]]) -> Float[np.ndarray, " words"]:
    """``e0^T J_k1 ... J_kw e0`` of words (indices from 0), through inner products of half-words."""
    halves: dict[tuple[int, ...], np.ndarray] = {(): np.eye(operators.shape[1])[0]}
    return _by_halves(words, lambda k, half: operators[k] @ half, halves)


def moments_of_matrices(matrices: Sequence[Float[Tensor, "dim dim"]], words: Sequence[Sequence[int]]) -> np.ndarray:
    """Normalised traces of words (indices from 0) in symmetric matrices, through inner products of half-words.

    Raises:
        ValueError: if the half-words would not fit in memory.
    """
    arrays = [m.double().numpy() for m in matrices]
    dim = len(arrays[0])
    longest = max(len(word) for word in words)
    if len(arrays) ** ((longest + 1) // 2 + 1) * dim * dim > _LARGEST_STACK:
        raise ValueError(
            f"`order` of `aim.solve` must be smaller at dim {dim}; got {longest}, whose half-words fill the memory."
        )
    halves = {(): np.eye(dim) / dim**0.5}
    return _by_halves(words, lambda k, half: arrays[k] @ half, halves)


def _by_halves(words, apply, halves) -> np.ndarray:  # type: ignore[no-untyped-def]
    """``<half of the reversed front, half of the back>`` for each word; ``halves`` starts with the empty one."""

    def half(letters: tuple[int, ...]) -> np.ndarray:
        if letters not in halves:
            halves[letters] = apply(letters[0], half(letters[1:]))
        found: np.ndarray = halves[letters]
        return found

    pairs = []
    for word in words:
        middle = len(word) // 2
        pairs.append((tuple(word[:middle][::-1]), tuple(word[middle:])))
    for pair in pairs:
        half(pair[0]), half(pair[1])
    place = {letters: i for i, letters in enumerate(halves)}
    stack = np.stack([h.ravel() for h in halves.values()])
    gram = stack @ stack.T
    return np.array([gram[place[a], place[b]] for a, b in pairs])
