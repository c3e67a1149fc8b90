"""Muon: the polar factor of the momentum."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from specgrad.linalg import polar_factor
from specgrad.optim.spectral import SpectralOptimizer


class Muon(SpectralOptimizer):
    """Momentum, orthogonalised: ``W <- (1 - lr decay) W - lr factor(shape) polar(momentum)``.

    Arguments are those of `SpectralOptimizer`. Hidden matrices take the spectral step and the rest of a model AdamW, in
    one optimizer object, when the groups come from `specgrad.optim.param_groups`.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> weight.grad = torch.diag(torch.tensor([5.0, 0.5]))
        >>> Muon([weight], lr=0.1, scale="none").step()
        >>> weight.diagonal().round(decimals=1).tolist()
        [-0.10000000149011612, -0.10000000149011612]

    Source: Jordan et al., Muon (2024); Davis and Drusvyatskiy (arXiv 2512.04299), section 1.
    """

    def direction(self, momentum: Float[Tensor, "batch m n"], group: dict[str, Any]) -> Float[Tensor, "batch m n"]:
        """Polar factors of the stack."""
        return polar_factor(momentum)
