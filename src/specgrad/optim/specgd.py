"""Spectral gradient descent: steepest descent in the operator norm, with the length its guarantee has."""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from specgrad.linalg import polar_factor
from specgrad.linalg.polar import Mode
from specgrad.optim.spectral import SpectralOptimizer


class SpecGD(SpectralOptimizer):
    """``W <- W - lr |G|_* polar(G)``: with ``lr = 1 / L_op`` each step decreases the loss by ``|G|_*^2 / (2 L_op)``.

    Without momentum, decay or shape factor unless asked for; the step vanishes with the gradient, unlike Muon's.

    Args:
        params: parameters, named parameters or groups.
        lr: learning rate, the inverse of the smoothness in operator norm.
        momentum: decay of the running gradient, in [0, 1).
        nesterov: whether the direction looks one step ahead.
        weight_decay: decoupled weight decay.
        mode: accuracy of the polar factor.
        settings: see `SpectralOptimizer`.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> weight.grad = torch.diag(torch.tensor([3.0, 1.0]))
        >>> SpecGD([weight], lr=0.25).step()
        >>> weight.diagonal().round(decimals=4).tolist()
        [-1.0, -1.0]

    Source: Davis and Drusvyatskiy (arXiv 2512.04299), the SpecGD step of section 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.1,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        *,
        mode: Mode = "exact",
        **settings: Any,
    ) -> None:
        polar_factor(torch.zeros(1, 1), mode=mode)  # refuses an unknown mode before any step
        self.mode = mode
        super().__init__(params, lr, momentum, nesterov, weight_decay, **({"scale": "none"} | settings))

    def direction(self, momentum: Float[Tensor, "batch m n"], group: dict[str, Any]) -> Float[Tensor, "batch m n"]:
        """Polar factors times nuclear norms, ``<M, polar(M)>``."""
        polar = polar_factor(momentum, mode=self.mode)
        # In half precision the nuclear norm, and the direction times it, would overflow or lose their digits.
        working = torch.promote_types(momentum.dtype, torch.float32)
        nuclear = (momentum.to(working) * polar.to(working)).sum(dim=(-2, -1), keepdim=True)
        return polar * nuclear

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"mode": self.mode}
