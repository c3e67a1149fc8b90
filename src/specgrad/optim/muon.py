"""Muon: the polar factor of the momentum."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from specgrad.linalg import polar_factor
from specgrad.linalg.polar import Method, Mode
from specgrad.linalg.torch_muon import TorchMuonPolar
from specgrad.optim.adapt import arranged_like, carried_state, check_knows, check_settings, decide, move, with_twins
from specgrad.optim.scaling import Scale
from specgrad.optim.spectral import Nonfinite, SpectralOptimizer, as_groups, initial_state

Orthogonalizer = Callable[[Tensor], Tensor]

# Attributes that copies and pickles keep; a probe stays with its model.
_OWN = ("mode", "method", "dtype", "orthogonalizer", "adapt_every", "threshold", "hysteresis", "_steps")


class Muon(SpectralOptimizer):
    """Momentum, orthogonalised: ``W <- (1 - lr decay) W - lr factor(shape) polar(momentum)``.

    Hidden matrices take the spectral step and the rest of a model AdamW, in one optimizer object, when the groups come
    from `specgrad.optim.param_groups`. Settings of ``torch.optim.Muon`` are understood: naming ``ns_coefficients``,
    ``ns_steps`` or ``eps`` selects its bfloat16 iteration, with which its trajectories are reproduced (but not its writing
    into the momentum of bfloat16 parameters without Nesterov).

    Args:
        params: parameters, named parameters or groups.
        lr: learning rate.
        momentum: decay of the running gradient, in [0, 1).
        nesterov: whether the direction looks one step ahead.
        weight_decay: decoupled weight decay, at the base ``lr``.
        nonfinite: what a gradient with Inf or NaN does: ``propagate``, ``skip`` or ``raise``.
        mode: accuracy of the polar factor, see `specgrad.linalg.polar_factor`.
        method: its method.
        dtype: its working dtype.
        orthogonalizer: a function on stacks of matrices that replaces the polar factor, such as a soft one.
        adjust_lr_fn: PyTorch's name of ``scale``: ``original`` or ``match_rms_adamw``.
        ns_coefficients: coefficients of PyTorch's quintic iteration.
        ns_steps: its number of steps.
        eps: its smallest Frobenius norm.
        adapt: a `specgrad.Probe` of the model: parameters of spectral groups move to AdamW and back as its last measurements
            say. Level 2 (`Probe.measure_advantage`) decides where it was measured, else a failing condition is a veto.
        adapt_every: steps between decisions.
        threshold: least predicted advantage for a spectral step.
        hysteresis: a parameter enters above ``threshold * hysteresis`` and leaves below ``threshold / hysteresis``.
        settings: the others of `SpectralOptimizer`, such as ``scale``, ``adamw_lr`` and ``sharding``.

    Raises:
        ValueError: for a setting out of range, or two that exclude each other.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> weight.grad = torch.diag(torch.tensor([5.0, 0.5]))
        >>> Muon([weight], lr=0.1, scale="none", mode="strict").step()
        >>> weight.diagonal().round(decimals=3).tolist()
        [-0.10000000149011612, -0.10000000149011612]

    Source: Jordan et al., Muon (2024); Davis and Drusvyatskiy (arXiv 2512.04299), section 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        *,
        nonfinite: Nonfinite = "propagate",
        mode: Mode = "fast",
        method: Method = "auto",
        dtype: torch.dtype | Literal["auto"] = "auto",
        orthogonalizer: Orthogonalizer | None = None,
        adjust_lr_fn: Scale | None = None,
        ns_coefficients: tuple[float, float, float] | None = None,
        ns_steps: int | None = None,
        eps: float | None = None,
        adapt: Any = None,
        adapt_every: int = 100,
        threshold: float = 1.0,
        hysteresis: float = 1.1,
        **settings: Any,
    ) -> None:
        if adjust_lr_fn is not None:
            if "scale" in settings:
                raise ValueError("`adjust_lr_fn` of `Muon` is PyTorch's name of `scale`; give one of them, not both.")
            settings["scale"] = adjust_lr_fn
        polar_factor(torch.zeros(1, 1), method, mode, dtype=dtype)  # refuses bad settings before any step
        torch_settings = (ns_coefficients, ns_steps, eps)
        if any(value is not None for value in torch_settings):
            if orthogonalizer is not None:
                raise ValueError("`orthogonalizer` of `Muon` excludes `ns_coefficients`, `ns_steps` and `eps`.")
            orthogonalizer = TorchMuonPolar(*torch_settings)
        self.mode, self.method, self.dtype, self.orthogonalizer = mode, method, dtype, orthogonalizer
        if adapt is not None:
            check_settings(adapt, adapt_every, threshold, hysteresis)
            params = with_twins(as_groups(params))
        super().__init__(params, lr, momentum, nesterov, weight_decay, nonfinite=nonfinite, **settings)
        if adapt is not None:
            check_knows(self.param_groups, adapt)
        self.adapt, self.adapt_every, self.threshold, self.hysteresis = adapt, adapt_every, threshold, hysteresis
        self._steps = 0

    def direction(self, momentum: Float[Tensor, "batch m n"], group: dict[str, Any]) -> Float[Tensor, "batch m n"]:
        """Polar factors of the stack."""
        if self.orthogonalizer is not None:
            return self.orthogonalizer(momentum)
        return polar_factor(momentum, self.method, self.mode, dtype=self.dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; with ``adapt``, before it the decision who takes spectral steps, at every ``adapt_every``-th."""
        if self.adapt is not None and self._steps and self._steps % self.adapt_every == 0:
            self.reroute()
        self._steps += 1
        return super().step(closure)

    def reroute(self) -> list[str]:
        """Decides now, from the probe's last measurements, which parameters take spectral steps.

        Returns:
            Names of the parameters that changed sides, with the update they take from now on.

        Raises:
            RuntimeError: if the optimizer was built without ``adapt``.
        """
        if self.adapt is None:
            raise RuntimeError("`Muon.reroute` needs a probe; build the optimizer with adapt=probe.")
        moved = []
        for parameter, here, there in decide(self.param_groups, self.adapt, self.threshold, self.hysteresis):
            names = dict(zip(map(id, here["params"]), here.get("param_names", ()), strict=False))
            move(parameter, here, there)
            fresh = initial_state(parameter, there["update"])
            self.state[parameter] = carried_state(self.state[parameter], fresh)
            moved.append(f"{names.get(id(parameter), 'a parameter')}: {there['update']}")
        return moved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; with ``adapt``, parameters are first put on the sides they were on when it was saved."""
        if self.adapt is not None:
            arranged_like(self.param_groups, state_dict["param_groups"])
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        mine = {k: self.__dict__[k] for k in _OWN}
        return super().__getstate__() | mine | {"adapt": None}
