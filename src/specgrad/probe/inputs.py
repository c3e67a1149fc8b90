"""Statistics of a layer's inputs, streamed over every forward pass of a step: sums add up, stable ranks do not."""

import math
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specgrad.linalg.backend import exact_products
from specgrad.linalg.estimators import Operator
from specgrad.linalg.ranks import gram_eigenvalues, stable_rank_of_squares
from specgrad.linalg.subspace import TopPair, top_pair, top_subspace

# Ranks of a frequency table that a power law is fitted to: those with at least this many counts, whose logarithm has a
# relative error below a half, and at least this many of them.
_LEAST_COUNT = 5
_LEAST_RANKS = 8

# Above this share of the sum of squares in one row, the stable rank is also given without that row.
OUTLIER_SHARE = 0.05


@runtime_checkable
class InputMatrix(Protocol):
    """A matrix of inputs, one row per token, known by what the statistics need."""

    tokens: int
    features: int

    def operator(self) -> Operator:
        """Products with the matrix and its transpose."""

    def gram(self) -> Float[Tensor, "k k"]:
        """Gram matrix of the features."""

    def total(self) -> Float[Tensor, " k"]:
        """Sum of the rows."""

    def row_squares(self) -> Float[Tensor, " n"]:
        """Squared norm of each row."""

    def row(self, index: int) -> Float[Tensor, " k"]:
        """One row."""


def in_range(inputs: Tensor) -> Tensor:
    """The inputs in float32 at least, and in float64 where their squares would leave the range of float32."""
    working = inputs if inputs.dtype == torch.float64 else inputs.float()
    if working.dtype == torch.float32 and working.numel() and not 1e-12 < working.abs().max() < 1e12:
        return working.double()
    return working


class Rows:
    """Inputs of a linear layer."""

    def __init__(self, inputs: Float[Tensor, "*batch k"]) -> None:
        self.matrix = inputs.detach().reshape(-1, inputs.shape[-1])
        self.matrix = self.matrix if self.matrix.dtype == torch.float64 else self.matrix.float()
        self.tokens, self.features = self.matrix.shape
        self._norms: Tensor = torch.linalg.vector_norm(self.matrix, dim=1)
        if self.matrix.dtype == torch.float32 and self.tokens and not 1e-12 < self._norms.max() < 1e12:
            # Squares and their products would leave the range of float32.
            self.matrix = self.matrix.double()
            self._norms = torch.linalg.vector_norm(self.matrix, dim=1)

    def operator(self) -> Operator:
        """Products with the stored matrix."""
        return Operator.of(self.matrix)

    def gram(self) -> Float[Tensor, "k k"]:
        """Gram matrix, products in the working precision."""
        return self.matrix.mT @ self.matrix

    def total(self) -> Float[Tensor, " k"]:
        """Sum of the rows."""
        return self.matrix.sum(0)

    def row_squares(self) -> Float[Tensor, " n"]:
        """Squared norm of each row."""
        return self._norms.square()

    def row(self, index: int) -> Float[Tensor, " k"]:
        """One row."""
        return self.matrix[index]


@dataclass
class InputStatistics:
    """Sums over the input rows of a step, and what the top singular value is estimated from.

    Attributes:
        tokens: number of rows.
        squares: squared Frobenius norm.
        total: sum of the rows.
        largest: squared norm of the largest row.
        largest_row: that row.
        gram: Gram matrix in float64, where it is computed exactly.
        basis: subspace of the estimate, where it is not.
        products: sum of ``A^T A`` times the basis.
        parts: numbers of the distinct inputs that were added; equal lists mean equal statistics.
    """

    tokens: int = 0
    squares: Tensor | float = 0.0
    total: Tensor | None = None
    largest: Tensor | float = 0.0
    largest_row: Tensor | None = None
    gram: Tensor | None = None
    basis: Tensor | None = None
    products: Tensor | None = None
    parts: list[int] = field(default_factory=list)
    _pair: tuple[Tensor, TopPair] | None = None

    @classmethod
    @torch.no_grad()
    def of(
        cls, inputs: InputMatrix, part: int, *, exact: bool, basis: Tensor | None = None, start: Tensor | None = None
    ) -> "InputStatistics":
        """Statistics of one forward pass.

        Args:
            inputs: the rows.
            part: number of this input.
            exact: compute the Gram matrix.
            basis: subspace chosen on an earlier part of the step; None chooses one.
            start: where the choice starts, such as the top direction of the last measurement; default: the mean row.
        """
        if not inputs.tokens:
            return cls(parts=[part])
        with exact_products(inputs.total().device):
            squares = inputs.row_squares()
            at = int(squares.argmax())
            total = inputs.total()
            found = cls(
                inputs.tokens, squares.sum(dtype=torch.float64), total.double(), squares[at].double(),
                inputs.row(at).double(), parts=[part],
            )  # fmt: skip
            if exact:
                found.gram = inputs.gram().double()
                return found
            if basis is None:
                norm = torch.linalg.vector_norm(total)
                first = start if start is not None else total if norm > 0 else inputs.row(at)
                basis, products = top_subspace(inputs.operator(), first.to(total.dtype), warm=start is not None)
            else:
                operator = inputs.operator()
                products = operator.apply_transposed(operator.apply(basis.to(total.dtype)))
            found.basis, found.products = basis, products.double()
        return found

    def add(self, other: "InputStatistics") -> None:
        """Adds the statistics of further rows, taken with the same basis."""
        # Out of place: layers with a common input share the tensors.
        self.parts = [*self.parts, *other.parts]
        if not other.tokens:
            return
        if float(other.largest) > float(self.largest):
            self.largest, self.largest_row = other.largest, other.largest_row
        self.tokens += other.tokens
        self.squares = self.squares + other.squares
        self.total = _sum(self.total, other.total)
        self.gram = _sum(self.gram, other.gram)
        self.products = _sum(self.products, other.products)
        self.basis = self.basis if self.basis is not None else other.basis

    def restricted(self, columns: tuple[int, int]) -> "InputStatistics":
        """The statistics of a range of features; needs the Gram matrix."""
        low, high = columns
        if self.gram is None or self.total is None:
            return InputStatistics(self.tokens, parts=self.parts)
        gram = self.gram[low:high, low:high]
        return InputStatistics(
            self.tokens, gram.diagonal().sum(), self.total[low:high], math.nan, None, gram,
            parts=[*self.parts, -1 - low, -1 - high],
        )  # fmt: skip

    def ranks(self) -> dict[str, Any]:
        """Stable rank with its error and side, noise-to-signal ratio, share and effect of the largest row.

        ``stable_rank_error`` is relative: zero for the exact value, else the residual of the top pair. An estimate never
        lies below the truth.
        """
        squares = float(self.squares)
        nothing: dict[str, Any] = {
            "stable_rank": math.nan, "stable_rank_error": math.nan, "stable_rank_side": "exact",
            "noise_to_signal": math.nan, "outlier_share": math.nan, "stable_rank_rest": math.nan,
        }  # fmt: skip
        if not (self.tokens and squares > 0 and math.isfinite(squares)):
            return nothing
        assert self.total is not None
        signal = float(self.total.square().sum()) / self.tokens
        share = float(self.largest) / squares
        common = {"noise_to_signal": squares / signal if signal > 0 else math.inf, "outlier_share": share}
        if self.gram is not None:
            values = gram_eigenvalues(self.gram)
            rest = math.nan
            if share > OUTLIER_SHARE and self.tokens > 1 and self.largest_row is not None:
                without = self.gram - torch.outer(self.largest_row, self.largest_row)
                rest = float(stable_rank_of_squares(gram_eigenvalues(without)))
            exact = {"stable_rank": float(stable_rank_of_squares(values)), "stable_rank_error": 0.0}
            return exact | {"stable_rank_side": "exact"} | common | {"stable_rank_rest": rest}
        if self.basis is None or self.products is None:
            return nothing
        pair = self._top_pair()
        value = squares / pair.value if pair.value > 0 else math.nan
        estimate = {"stable_rank": max(1.0, value), "stable_rank_error": pair.error, "stable_rank_side": "above"}
        return estimate | common | {"stable_rank_rest": math.nan}

    def top_direction(self) -> Tensor | None:
        """Where the next measurement's estimate starts."""
        if self.basis is None or self.products is None:
            return None
        return self._top_pair().vector

    def _top_pair(self) -> TopPair:
        assert self.basis is not None and self.products is not None
        if self._pair is None or self._pair[0] is not self.products:
            self._pair = self.products, top_pair(self.basis.double(), self.products)
        return self._pair[1]


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return second if first is None else first if second is None else first + second


@dataclass
class TokenCounts:
    """Token counts of an embedding: its input is the token-indicator matrix, of stable rank ``1 / p_max`` exactly.

    Source: Davis and Drusvyatskiy (arXiv 2512.04299), the token-indicator structure of section 1.1.
    """

    counts: Int[Tensor, " vocabulary"]

    @property
    def tokens(self) -> int:
        """Number of tokens seen in the step."""
        return int(self.counts.sum())

    @torch.no_grad()
    def add(self, ids: Int[Tensor, "*batch"], padding_index: int | None = None) -> None:
        """Counts the tokens of one forward pass; padding has no gradient and is left out."""
        flat = ids.reshape(-1).to(self.counts.device)
        if padding_index is not None:
            flat = flat[flat != padding_index]
        self.counts += torch.bincount(flat, minlength=self.counts.numel())

    def ranks(self) -> dict[str, Any]:
        """As `InputStatistics.ranks`, and the exponent of the token frequencies."""
        n = self.tokens
        largest = int(self.counts.max()) if n else 0
        p = self.counts.double() / max(n, 1)
        return {
            "stable_rank": n / largest if n else math.nan,
            "stable_rank_error": 0.0 if n else math.nan,
            "stable_rank_side": "exact",
            "noise_to_signal": float(1 / p.square().sum()) if n else math.nan,
            "outlier_share": 1 / n if n else math.nan,
            "stable_rank_rest": math.nan,
            "frequency_exponent": frequency_exponent(self.counts),
        }


def frequency_exponent(counts: Int[Tensor, " vocabulary"]) -> float:
    """Exponent s of token frequencies ``p_j ~ j^-s`` over their ranks j.

    Least squares of log counts on log ranks, weighted by the counts, which are the inverse variances of the logarithms.

    Args:
        counts: how often each token occurred; at least eight must have occurred five times.

    Returns:
        The exponent; NaN with fewer tokens.

    Example:
        >>> round(frequency_exponent((10_000 / torch.arange(1, 200)).round().long()), 2)
        1.0
    """
    ordered = counts.sort(descending=True).values.double()
    ordered = ordered[ordered >= _LEAST_COUNT]
    if len(ordered) < _LEAST_RANKS:
        return math.nan
    x, y, w = torch.arange(1, len(ordered) + 1).double().log(), ordered.cpu().log(), ordered.cpu()
    dx, dy = x - (w * x).sum() / w.sum(), y - (w * y).sum() / w.sum()
    spread = float((w * dx.square()).sum())
    return -float((w * dx * dy).sum()) / spread if spread > 0 else math.nan
