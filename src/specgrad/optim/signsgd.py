"""SignSGD: steepest descent in the maximum norm, the spectral update of a diagonal matrix."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from specgrad.optim.spectral import SpectralOptimizer


class SignSGD(SpectralOptimizer):
    """``w <- (1 - lr decay) w - lr sign(momentum)``, for parameters of any shape.

    A norm's gain acts as a diagonal matrix, whose polar factor is the sign; in a group of another optimizer the same is
    ``update="sign"``. Arguments are those of `SpectralOptimizer`.

    Example:
        >>> import torch
        >>> gain = torch.nn.Parameter(torch.ones(3))
        >>> gain.grad = torch.tensor([2.0, -0.1, 0.0])
        >>> SignSGD([gain], lr=0.5, weight_decay=0.0).step()
        >>> gain.tolist()
        [0.5, 1.5, 1.0]

    Source: Davis and Drusvyatskiy (arXiv 2512.04299), the diagonal case of the layered model.
    """

    default_update = "sign"

    def direction(self, momentum: Float[Tensor, "batch m n"], group: dict[str, Any]) -> Float[Tensor, "batch m n"]:
        """Signs, also of matrices that a group gives to the direction."""
        return momentum.sign()
