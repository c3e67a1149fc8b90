"""What is learned: attention matrices of students that imitate teachers, from Gaussian tokens."""

from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from specgrad.aim.activations import Pointwise
from specgrad.aim.ensembles import gaussian_factor
from specgrad.aim.losses import ScoreLoss
from specgrad.aim.potential import Potential
from specgrad.runs.seeds import stream

Attention = Literal["tied", "direct"]
Student = Literal["gaussian", "symmetric", "wishart", "traceless"]
Teacher = Literal["wishart", "gaussian", "symmetric", "traceless"]
Array = np.ndarray | Tensor


@dataclass(frozen=True, eq=False)
class Task:
    """Teachers to be imitated and students that imitate them.

    Scores are ``G_ijk = (x_i^T S_k x_j - C_ij Tr S_k)/sqrt(d)`` with tokens ``x_i`` of covariance ``C (x) I_d``. Tied
    attention trains W with ``S = W W^T``; direct attention trains S itself. Students come first among the indices.

    Attributes:
        dim: dimension d of a token; None leaves only the limit d = infinity.
        student_ratio: rank of a student over d; a tuple for several students.
        teacher_ratio: rank of a teacher over d; a tuple for several teachers.
        student_scale: entries of a student's factor are ``N(0, student_scale/d)``, independent.
        teacher_scale: the same of a teacher's.
        attention: ``tied`` or ``direct``.
        activation: ``h1``, ``h2``, ``h3``, ``tanh``, ``logistic``, ``softmax`` (over rows) or an elementwise function.
        loss: ``squared`` (or ``mse``, the same) or a function of scores ``(batch, tokens, tokens, indices)``.
        tokens: number of tokens L.
        weight_decay: gamma; one step of SGD subtracts ``lr gamma/d`` times the weights.
        covariance: token covariance C, shape (L, L); None is the identity.
        student: start of a direct student: ``gaussian`` (independent entries, in the limit no trace and no symmetry),
            ``symmetric`` (Gaussian symmetric), ``wishart`` (``W W^T``) or ``traceless`` (Wishart minus its trace). Tied
            students are always Gaussian factors.
        teacher: law of a teacher's S: ``wishart``, ``symmetric``, ``traceless``, or ``gaussian`` if direct.
        student_matrix: given start instead: W of shape (dim, rank) if tied, S if direct; one student only.
        teacher_matrix: given S of the teacher; one teacher only.
        trainable: indices that are trained; None trains the students.

    Raises:
        ValueError: for a setting out of range or that does not fit the others.

    Example:
        >>> task = Task(activation="h2")
        >>> task.potential.gamma([[0.5, 0.25], [0.25, 0.5]]).tolist()
        [[4.0, -2.0], [-2.0, 4.0]]
    """

    dim: int | None = None
    student_ratio: float | tuple[float, ...] = 1.0
    teacher_ratio: float | tuple[float, ...] = 1.0
    student_scale: float = 0.5
    teacher_scale: float = 0.5
    attention: str = "tied"
    activation: str | Pointwise = "h2"
    loss: str | ScoreLoss = "squared"
    tokens: int = 1
    weight_decay: float = 0.0
    covariance: Any = None
    student: str | None = None
    teacher: str = "wishart"
    student_matrix: Array | None = None
    teacher_matrix: Array | None = None
    trainable: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.attention not in get_args(Attention):
            allowed = ", ".join(get_args(Attention))
            raise ValueError(f"`attention` of `aim.Task` must be one of {allowed}; got {self.attention!r}.")
        self._check_sizes()
        self._check_names()
        self._check_matrices()
        _ = self.potential

    def _check_names(self) -> None:
        if self.attention == "tied" and self.student is not None:
            raise ValueError("`student` of `aim.Task` is for attention='direct'; tied students start as Gaussian factors.")
        if self.student is not None and self.student not in get_args(Student):
            allowed = ", ".join(get_args(Student))
            raise ValueError(f"`student` of `aim.Task` must be one of {allowed}; got {self.student!r}.")
        if self.teacher not in get_args(Teacher):
            allowed = ", ".join(get_args(Teacher))
            raise ValueError(f"`teacher` of `aim.Task` must be one of {allowed}; got {self.teacher!r}.")
        if self.attention == "tied" and self.teacher == "gaussian":
            raise ValueError(
                "`teacher` of a tied `aim.Task` must be symmetric: wishart, symmetric or traceless; got 'gaussian'."
            )
        if self.trainable is not None and not (
            isinstance(self.trainable, tuple) and self.trainable and set(self.trainable) <= set(range(self.indices))
        ):
            raise ValueError(
                f"`trainable` of `aim.Task` must be a tuple of indices < {self.indices}, not empty; got {self.trainable}."
            )
        if self.attention == "tied" and self.teacher != "wishart" and any(k >= self.students for k in self.trained):
            raise ValueError("`trainable` of a tied `aim.Task` may only list a teacher whose law is 'wishart'.")

    def _check_sizes(self) -> None:
        if self.dim is not None and not (isinstance(self.dim, Integral) and self.dim >= 2):
            raise ValueError(f"`dim` of `aim.Task` must be an integer >= 2 or None; got {self.dim!r}.")
        for name, ratios in (("student_ratio", self.student_ratios), ("teacher_ratio", self.teacher_ratios)):
            if not ratios or not all(isinstance(r, Real) and 0 < r < np.inf for r in ratios):
                raise ValueError(
                    f"`{name}` of `aim.Task` must be > 0, or a tuple of such numbers; got {getattr(self, name)!r}."
                )
            if self.dim is not None and not all(round(r * self.dim) >= 1 for r in ratios):
                raise ValueError(
                    f"`{name}` of `aim.Task` must give a rank >= 1, that is be more than {0.5 / self.dim:.3g} at dim "
                    f"{self.dim}; got {getattr(self, name)}."
                )
        for name in ("student_scale", "teacher_scale"):
            if not 0 < getattr(self, name) < np.inf:
                raise ValueError(f"`{name}` of `aim.Task` must be > 0; got {getattr(self, name)}.")
        if not 0 <= self.weight_decay < np.inf:
            raise ValueError(f"`weight_decay` of `aim.Task` must be >= 0; got {self.weight_decay}.")

    def _check_matrices(self) -> None:
        for name, count in (("student_matrix", self.students), ("teacher_matrix", self.indices - self.students)):
            matrix = getattr(self, name)
            if matrix is None:
                continue
            if self.dim is None:
                raise ValueError(f"`{name}` of `aim.Task` needs `dim`, its number of rows.")
            if count != 1:
                raise ValueError(f"`{name}` of `aim.Task` gives one matrix; the task has {count} of its kind.")
            square = name == "teacher_matrix" or self.attention == "direct"
            wanted = (self.dim, self.dim) if square else (self.dim, None)
            if not isinstance(matrix, np.ndarray | Tensor):
                raise ValueError(f"`{name}` of `aim.Task` must be an array or a tensor; got {type(matrix).__name__}.")
            shape = tuple(matrix.shape)
            if len(shape) != 2 or shape[0] != self.dim or (square and shape[1] != self.dim) or shape[1] < 1:
                raise ValueError(f"`{name}` of `aim.Task` must have shape {wanted}; got {shape}.".replace("None", "rank"))
            if not torch.as_tensor(matrix).isfinite().all():
                raise ValueError(f"`{name}` of `aim.Task` must be finite; it holds NaN or infinities.")
            if name == "teacher_matrix" and self.attention == "tied" and not _symmetric(matrix):
                raise ValueError("`teacher_matrix` of a tied `aim.Task` must be symmetric.")

    @property
    def student_ratios(self) -> tuple[float, ...]:
        """Ranks over d, one per student."""
        return self.student_ratio if isinstance(self.student_ratio, tuple) else (self.student_ratio,)

    @property
    def teacher_ratios(self) -> tuple[float, ...]:
        """Ranks over d, one per teacher."""
        return self.teacher_ratio if isinstance(self.teacher_ratio, tuple) else (self.teacher_ratio,)

    @property
    def students(self) -> int:
        """Number of students; their indices are 0, 1, ..."""
        return len(self.student_ratios)

    @property
    def indices(self) -> int:
        """Number of indices K, students and teachers."""
        return self.students + len(self.teacher_ratios)

    @property
    def trained(self) -> tuple[int, ...]:
        """Indices that are trained."""
        return tuple(range(self.students)) if self.trainable is None else tuple(sorted(set(self.trainable)))

    @property
    def single(self) -> bool:
        """One trained student and one frozen teacher."""
        return self.students == 1 and self.indices == 2 and self.trained == (0,)

    @property
    def start(self) -> str:
        """Law of a student's start: ``gaussian`` factors if tied, ``student`` or ``gaussian`` entries if direct."""
        return self.student or "gaussian"

    @cached_property
    def potential(self) -> Potential:
        """Phi of this loss."""
        signs = (1,) * self.students + (-1,) * len(self.teacher_ratios)
        return Potential(self.activation, self.loss, self.tokens, self.covariance, signs)

    def weights(self, seed: int = 0) -> list[Float[Tensor, "dim columns"]]:
        """What SGD starts from, float64: W of each trained index if tied and S of the rest, or every S if direct.

        Args:
            seed: seed of the draws; each index has its own stream.

        Raises:
            ValueError: if the task has no ``dim``.
        """
        if self.dim is None:
            raise ValueError("`dim` of `aim.Task` must be given to draw matrices; got None.")
        return [self._draw(k, int(seed), self.dim) for k in range(self.indices)]

    def matrices(self, seed: int = 0) -> list[Float[Tensor, "dim dim"]]:
        """Every S at the start, float64."""
        factors = self.trained if self.attention == "tied" else ()
        return [w @ w.mT if k in factors else w for k, w in enumerate(self.weights(seed))]

    def _draw(self, index: int, seed: int, dim: int) -> Float[Tensor, "dim columns"]:
        is_student = index < self.students
        given = self.student_matrix if is_student else self.teacher_matrix
        generator = stream(seed, "weights", index)
        factor = self.attention == "tied" and (is_student or index in self.trained)
        if given is not None:
            matrix = torch.as_tensor(given).double()
            if self.attention == "direct" or index in self.trained:
                return matrix
            return _gram(matrix) if is_student else (matrix + matrix.mT) / 2
        ratio = (self.student_ratios + self.teacher_ratios)[index]
        scale = self.student_scale if is_student else self.teacher_scale
        if factor:
            w = gaussian_factor(dim, ratio, scale, generator)
            return w if index in self.trained else _gram(w)
        return _drawn(self.start if is_student else self.teacher, dim, ratio, scale, generator)


def _drawn(law: str, dim: int, ratio: float, scale: float, generator: torch.Generator) -> Float[Tensor, "dim dim"]:
    if law in ("gaussian", "symmetric"):
        matrix = torch.randn(dim, dim, generator=generator, dtype=torch.float64).mul_((scale / dim) ** 0.5)
        return matrix if law == "gaussian" else (matrix + matrix.mT).div_(2**0.5)
    matrix = _gram(gaussian_factor(dim, ratio, scale, generator))
    if law == "traceless":
        matrix = matrix - matrix.trace() / dim * torch.eye(dim, dtype=torch.float64)
    return matrix


def _gram(w: Float[Tensor, "dim rank"]) -> Float[Tensor, "dim dim"]:
    """``W W^T``, symmetric to the last bit, which a product need not be and SGD in the teacher's eigenvectors asks for."""
    product = w @ w.mT
    return (product + product.mT) / 2


def _symmetric(matrix: Array) -> bool:
    array = torch.as_tensor(matrix).double()
    return bool(torch.allclose(array, array.mT, atol=1e-10 * float(array.abs().max())))
