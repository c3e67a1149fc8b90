"""Shape factors: how the step of a spectral update depends on the shape of its matrix.

A polar factor of an m x n matrix has root mean square ``sqrt(1 / max(m, n))`` at full rank, whatever the gradient's
size; each factor states what is to stay fixed across shapes instead.
"""

import math
from collections.abc import Callable
from typing import Literal

Scale = Literal["none", "original", "match_rms_adamw", "spectral"]

SHAPE_FACTORS: dict[str, Callable[[int, int], float]] = {
    # The bare polar factor.
    "none": lambda rows, cols: 1.0,
    # Jordan et al. (2024): tall matrices are scaled up so that every output moves alike.
    "original": lambda rows, cols: math.sqrt(max(1.0, rows / cols)),
    # Liu et al. (arXiv 2502.16982): root mean square 0.2, so that learning rates tuned for AdamW carry over.
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    # Yang, Simon and Bernstein (2023), the spectral condition: outputs of unit rms move by the learning rate.
    "spectral": lambda rows, cols: math.sqrt(rows / cols),
}


def shape_factor(scale: Scale, rows: int, cols: int) -> float:
    """Factor on the learning rate of a ``rows`` x ``cols`` matrix (outputs x inputs).

    Args:
        scale: ``none``, ``original``, ``match_rms_adamw`` or ``spectral``.
        rows: output dimension.
        cols: input dimension; for a convolution ``in_channels / groups * kernel_height * kernel_width``.

    Raises:
        ValueError: for an unknown ``scale``.

    Example:
        >>> shape_factor("original", 512, 128)
        2.0
    """
    if scale not in SHAPE_FACTORS:
        raise ValueError(f"`scale` must be one of {', '.join(SHAPE_FACTORS)}; got {scale!r}.")
    return SHAPE_FACTORS[scale](rows, cols)
