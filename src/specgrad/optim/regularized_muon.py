"""Muon with a soft polar factor that leaves small singular values small."""

from collections.abc import Iterable
from typing import Any

from jaxtyping import Float
from torch import Tensor

from specgrad.linalg import h_lambda
from specgrad.optim.spectral import SpectralOptimizer


class RegularizedMuon(SpectralOptimizer):
    """``W <- (1 - lr decay) W - lr factor(shape) h_lambda(momentum)``; h_lambda maps s to ``s / sqrt(s^2 + lam^2)``.

    Args:
        params: parameters, named parameters or groups.
        lr: learning rate.
        lam: scale below which singular values of the momentum stay small, > 0, in units of the gradient.
        settings: see `SpectralOptimizer`.

    Raises:
        ValueError: if ``lam`` is not positive and finite.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> weight.grad = torch.diag(torch.tensor([4.0, 0.0]))
        >>> RegularizedMuon([weight], lr=0.1, lam=3.0, momentum=0.0, scale="none").step()
        >>> weight.diagonal().round(decimals=4).tolist()
        [-0.07999999821186066, 0.0]

    Source: Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554), the regularised polar map.
    """

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 0.02, lam: float = 1e-3, **settings: Any) -> None:
        if not 0 < lam < float("inf"):
            raise ValueError(f"`lam` of `RegularizedMuon` must be finite and > 0; got {lam}.")
        self.lam = lam
        super().__init__(params, lr, **settings)

    def direction(self, momentum: Float[Tensor, "batch m n"], group: dict[str, Any]) -> Float[Tensor, "batch m n"]:
        """Soft polar factors of the stack."""
        return h_lambda(momentum, self.lam)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"lam": self.lam}
