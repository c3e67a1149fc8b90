"""What the kernels refuse, by name."""

from torch import Tensor


def check_real(function: str, argument: str, value: object) -> None:
    """Refuses what is no tensor of a real floating dtype.

    Raises:
        TypeError: naming the argument and what it was.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"`{argument}` of `{function}` must be a torch tensor; got {type(value).__name__}.")
    if not value.dtype.is_floating_point:
        raise TypeError(f"`{argument}` of `{function}` must have a real floating dtype; got {value.dtype}.")


def check_matrix(function: str, matrix: object) -> None:
    """Refuses what is no real matrix or batch of matrices.

    Raises:
        TypeError: if it is no tensor of a real floating dtype.
        ValueError: if it has fewer than two axes.
    """
    check_real(function, "matrix", matrix)
    if isinstance(matrix, Tensor) and matrix.ndim < 2:
        raise ValueError(
            f"`matrix` of `{function}` must have at least two axes (batch, rows, columns); got shape {tuple(matrix.shape)}. "
            "Reshape a vector to one row or one column."
        )
