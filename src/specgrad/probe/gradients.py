"""Soft ranks and norms of a layer's gradient."""

import math

from jaxtyping import Float
from torch import Tensor

from specgrad.linalg.ranks import gram_eigenvalues, nuclear_rank_of_squares, short_gram, stable_rank_of_squares

NO_RANKS = {
    "nuclear_rank": math.nan, "participation_ratio": math.nan, "gradient_stable_rank": math.nan,
    "gradient_norm": math.nan, "nuclear_norm": math.nan, "spectral_norm": math.nan,
}  # fmt: skip


def squared_singular_values(gradient: Float[Tensor, "m k"]) -> Float[Tensor, " r"]:
    """Squared singular values, descending, from the float64 Gram matrix of the short side: error below 0.01 %."""
    return gram_eigenvalues(short_gram(gradient))


def matrix_ranks(squares: Float[Tensor, " r"]) -> dict[str, float]:
    """Nuclear rank, participation ratio ``|G|_F^4 / |G G^T|_F^2``, stable rank and norms from squared singular values.

    Stable rank <= participation ratio <= nuclear rank <= rank. Norms are those of the gradient as backward left it, a loss
    scale included; ranks do not depend on it.

    Example:
        >>> import torch
        >>> ranks = matrix_ranks(torch.tensor([16.0, 9.0]))
        >>> round(ranks["nuclear_rank"], 4), round(ranks["participation_ratio"], 4), ranks["gradient_stable_rank"]
        (1.96, 1.8546, 1.5625)

    Source: Davis and Drusvyatskiy (arXiv 2512.04299), section 1; the participation ratio is ours.
    """
    squares = squares.double()
    if not (len(squares) and squares[0] > 0 and bool(squares.isfinite().all())):
        return dict(NO_RANKS)
    relative = squares / squares[0]
    return {
        "nuclear_rank": float(nuclear_rank_of_squares(squares)),
        "participation_ratio": float(relative.sum().square() / relative.square().sum()),
        "gradient_stable_rank": float(stable_rank_of_squares(squares)),
        "gradient_norm": float(squares.sum().sqrt()),
        "nuclear_norm": float(squares.sqrt().sum()),
        "spectral_norm": float(squares[0].sqrt()),
    }


def gain_ranks(gradient: Float[Tensor, " k"]) -> dict[str, float]:
    """The analogue for a norm's gain: the diagonal matrix of its gradient.

    Its nuclear norm is the l1 norm, its spectral norm the largest entry; the spectral step is the sign step.

    Example:
        >>> import torch
        >>> gain_ranks(torch.tensor([1.0, -1.0, 0.0]))["nuclear_rank"]
        2.0

    Source: Davis and Drusvyatskiy (arXiv 2512.04299), the diagonal blocks of section 4.
    """
    return matrix_ranks(gradient.double().abs().sort(descending=True).values.square())


def shardwise_nuclear_rank(gradient: Float[Tensor, "m k"], parts: int, axis: int = 0) -> float:
    """``sum_s |G_s|_*^2 / |G|_F^2`` over row (axis 0) or column (axis 1) shards, which replaces nr for a shardwise step.

    Between ``nr / parts`` and ``nr``.

    Example:
        >>> import torch
        >>> round(shardwise_nuclear_rank(torch.eye(4), 2), 6), round(shardwise_nuclear_rank(torch.ones(4, 4), 2), 6)
        (2.0, 1.0)

    Source: Davis and Drusvyatskiy (arXiv 2512.04299, second version), the shardwise step.
    """
    squares = [squared_singular_values(shard) for shard in gradient.tensor_split(parts, dim=axis) if shard.numel()]
    whole = sum(float(s.sum()) for s in squares)
    return sum(float(s.sqrt().sum()) ** 2 for s in squares) / whole if whole > 0 else math.nan
