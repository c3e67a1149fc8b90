"""Gaussian embedding rows by number: the same rows whether held in memory, streamed or split over processes."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Kind = Literal["unembeddings", "embeddings"]
_STREAM = {"unembeddings": 0, "embeddings": 1}

# Rows per random stream. Up to this many items the rows are those of one numpy generator with seed [seed, 0] or [seed, 1];
# later ones come from [seed, 0, block], so that a process can begin anywhere without drawing what lies before.
ROWS_PER_STREAM = 2**16


def gaussian_rows(
    kind: Kind, seed: int, start: int, stop: int, scale: Float[np.ndarray, " d"], unit_norm: bool, size: int
) -> Iterator[tuple[int, Float[Tensor, "rows d"]]]:
    """Rows ``start`` to ``stop`` in chunks, as pairs of the first row's number and a float64 tensor.

    ``row = scale * z`` with z standard normal, divided by its length if ``unit_norm``. A chunk never crosses the border
    between two streams; rows do not depend on ``size``.

    Args:
        kind: which of the two matrices.
        seed: seed of the task.
        start: first row.
        stop: one past the last row.
        scale: standard deviation of each coordinate.
        unit_norm: whether rows have length 1.
        size: largest number of rows in a chunk.
    """
    dim = len(scale)
    for block in range(start // ROWS_PER_STREAM, -(-stop // ROWS_PER_STREAM)):
        generator = np.random.default_rng([seed, _STREAM[kind], block] if block else [seed, _STREAM[kind]])
        row = block * ROWS_PER_STREAM
        end = min(stop, row + ROWS_PER_STREAM)
        while row < end:
            # Rows before the start are drawn and dropped: the generator cannot jump.
            last = min(row + size, start if row < start else end)
            drawn = generator.standard_normal((last - row, dim))
            if row >= start:
                drawn *= scale
                if unit_norm:
                    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
                yield row, torch.from_numpy(drawn)
            row = last


def power_law_scale(dim: int, kappa: float | int) -> Float[np.ndarray, " d"]:
    """Standard deviations whose squares are proportional to ``i^-kappa`` and sum to 1; ``kappa = 0`` is ``1/sqrt(d)``."""
    variances = np.arange(1, dim + 1, dtype=np.float64) ** -kappa
    scale: Float[np.ndarray, " d"] = np.sqrt(variances / variances.sum())
    return scale
