"""How a parameter is seen as matrices: splits of fused projections, heads, stacked experts, convolutions."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor

Layout = Literal["matrix", "flatten", "batch"]


@dataclass(frozen=True)
class Blocks:
    """Declares the matrices inside a parameter; each gets its own polar factor and shape factor.

    The state of the optimizer stays that of the whole parameter, so a declaration can change without losing it.

    Attributes:
        layout: ``matrix`` for a parameter with two axes; ``flatten`` keeps the first axis and joins the others
            (convolutions); ``batch`` takes all axes but the last two as a stack of matrices (experts).
        rows: split of the output axis: a number of equal parts (heads, groups), or the sizes of the parts (fused query,
            key, value of grouped attention).
        cols: the same for the input axis.
        transposed: the parameter is stored inputs x outputs; matters for the shape factor alone.

    Raises:
        ValueError: for an unknown layout or parts that are not positive.
    """

    layout: Layout = "matrix"
    rows: int | tuple[int, ...] = 1
    cols: int | tuple[int, ...] = 1
    transposed: bool = False

    def __post_init__(self) -> None:
        if self.layout not in ("matrix", "flatten", "batch"):
            raise ValueError(f"`layout` of `Blocks` must be matrix, flatten or batch; got {self.layout!r}.")
        for name in ("rows", "cols"):
            parts = getattr(self, name)
            if not isinstance(parts, int):
                # Lists come back from checkpoints; tuples are what a frozen dataclass can be compared by.
                object.__setattr__(self, name, tuple(parts))
            if not all(part > 0 for part in ((parts,) if isinstance(parts, int) else parts)) or parts == ():
                raise ValueError(f"`{name}` of `Blocks` must be a positive number of parts or their sizes; got {parts}.")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as an optimizer's group and its checkpoint hold them."""
        return asdict(self)

    def views(self, tensor: Tensor) -> list[Tensor]:
        """The matrices as views of a contiguous tensor, each with one leading batch axis.

        Raises:
            ValueError: if the shape does not fit the declaration.
        """
        if self.layout == "matrix" and tensor.ndim != 2:
            raise ValueError(f"must be a matrix for Blocks(layout='matrix'); got shape {tuple(tensor.shape)}")
        if self.layout == "batch" and tensor.ndim < 3:
            raise ValueError(f"must have at least three axes for Blocks(layout='batch'); got shape {tuple(tensor.shape)}")
        if self.layout == "flatten" and tensor.ndim < 2:
            raise ValueError(f"must have at least two axes for Blocks(layout='flatten'); got shape {tuple(tensor.shape)}")
        stack = tensor.reshape(-1, *tensor.shape[-2:]) if self.layout == "batch" else tensor.reshape(1, tensor.shape[0], -1)
        rows = _sizes(self.rows, stack.shape[1], "rows")
        cols = _sizes(self.cols, stack.shape[2], "cols")
        return [part for strip in stack.split(rows, dim=1) for part in strip.split(cols, dim=2)]

    def outputs_and_inputs(self, view: Tensor) -> tuple[int, int]:
        """Outputs and inputs of a matrix of `views`, which the shape factor is computed from."""
        rows, cols = view.shape[-2:]
        return (cols, rows) if self.transposed else (rows, cols)


def _sizes(parts: int | Sequence[int], length: int, name: str) -> list[int]:
    if isinstance(parts, int):
        if length % parts:
            raise ValueError(f"must have an axis divisible into {parts} `{name}`; got length {length}")
        return [length // parts] * parts
    if sum(parts) != length:
        raise ValueError(f"must have `{name}` that add up to {sum(parts)}; got length {length}")
    return list(parts)
