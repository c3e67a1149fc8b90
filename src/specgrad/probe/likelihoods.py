"""Losses of exponential-family type: their sampled scores, whose covariance is the Gauss-Newton curvature at the outputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Likelihood:
    """A loss that is a negative log-likelihood of the targets under the model, up to a constant factor.

    Attributes:
        name: for reports.
        loss: (outputs, targets) -> sum of the loss over all units (tokens, entries).
        units: (outputs, targets) -> number that the sum is divided by to give the training loss.
        score: (outputs, targets, generator) -> gradient of ``loss`` with respect to the outputs at targets sampled from
            the model: a random tensor like the outputs, independent between units, of mean zero.
        curvature: (outputs, targets, z) -> second derivative of ``loss`` along z at the outputs, the expectation of
            ``(score . z)^2``; None if only sampling is known.
    """

    name: str
    loss: Callable[[Tensor, Tensor], Tensor]
    units: Callable[[Tensor, Tensor], float]
    score: Callable[[Tensor, Tensor, torch.Generator], Tensor]
    curvature: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None


def cross_entropy(
    weight: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0, shift: bool = False
) -> Likelihood:
    """Classification by softmax; ``shift`` compares outputs with the targets one position later, as causal models do.

    The class axis of the outputs is the last where the targets have the shape of the others, else the second.
    """

    def flat(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if shift:
            outputs, targets = outputs[:, :-1], targets[:, 1:]
        if targets.shape != outputs.shape[:-1]:
            outputs = outputs.movedim(1, -1)
        if targets.shape != outputs.shape[:-1]:
            raise ValueError(
                f"`targets` must hold a class for every position of the outputs; got shape {tuple(targets.shape)} "
                f"for outputs of shape {tuple(outputs.shape)}."
            )
        if targets.is_floating_point():
            raise ValueError(f"`targets` of a cross entropy must be integer classes; got {targets.dtype}.")
        return outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        logits, classes = flat(outputs, targets)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        own = None if weight is None else weight.to(logits.dtype)
        return F.cross_entropy(
            logits, classes, own, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
        )

    def masses(outputs: Tensor, targets: Tensor) -> Tensor:
        _, classes = flat(outputs, targets)
        counted = classes != ignore_index
        return counted.float() if weight is None else weight[classes.clamp(min=0)] * counted

    def units(outputs: Tensor, targets: Tensor) -> float:
        return float(masses(outputs, targets).sum())

    @torch.no_grad()
    def score(outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
        logits, _ = flat(outputs, targets)
        p = logits.detach().float().softmax(-1)
        drawn = _classes(p, generator)
        v = p.scatter_add(1, drawn, -torch.ones_like(drawn, dtype=p.dtype)) * masses(outputs, targets).sqrt()[:, None]
        body = outputs[:, :-1] if shift else outputs
        moved = (targets[:, 1:] if shift else targets).shape != body.shape[:-1]
        v = v.reshape(body.movedim(1, -1).shape).movedim(-1, 1) if moved else v.reshape(body.shape)
        return (F.pad(v, (0, 0, 0, 1)) if shift else v).to(outputs.dtype)

    @torch.no_grad()
    def curvature(outputs: Tensor, targets: Tensor, z: Tensor) -> Tensor:
        logits, _ = flat(outputs, targets)
        along, _ = flat(z, targets)
        p, along = logits.double().softmax(-1), along.double()
        variance = (p * along.square()).sum(-1) - (p * along).sum(-1).square()
        return (masses(outputs, targets).double() * variance).sum()

    return Likelihood("cross entropy", loss, units, score, curvature)


def _classes(p: Tensor, generator: torch.Generator) -> Tensor:
    """A class for each row of probabilities, by inversion: one random number a row, where a race takes one per class."""
    ends = p.cumsum(-1)
    at = torch.rand(len(p), 1, generator=generator, device=p.device) * ends[:, -1:]
    return torch.searchsorted(ends, at, right=True).clamp(max=p.shape[-1] - 1)


def _like(targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets in the shape of the outputs, from which only axes of length one may be missing."""
    if targets.squeeze().shape != outputs.squeeze().shape:
        raise ValueError(
            f"`targets` must have the shape of the outputs; got {tuple(targets.shape)} for {tuple(outputs.shape)}."
        )
    return targets.reshape(outputs.shape)


def squared_error() -> Likelihood:
    """Gaussian regression: ``(output - target)^2``, averaged over entries."""
    return Likelihood(
        "squared error",
        lambda f, y: (f.float() if f.dtype != torch.float64 else f).sub(_like(y, f)).square().sum(),
        lambda f, y: float(f.numel()),
        lambda f, y, g: math.sqrt(2) * torch.randn(f.shape, generator=g, device=f.device, dtype=torch.float32).to(f.dtype),
        lambda f, y, z: 2 * z.double().square().sum(),
    )


def binary_cross_entropy() -> Likelihood:
    """Bernoulli targets in [0, 1] with logits as outputs, averaged over entries."""

    def score(f: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        p = f.detach().float().sigmoid()
        return (p - torch.bernoulli(p, generator=generator)).to(f.dtype)

    return Likelihood(
        "binary cross entropy",
        lambda f, y: F.binary_cross_entropy_with_logits(f.float(), _like(y, f).float(), reduction="sum"),
        lambda f, y: float(f.numel()),
        score,
        lambda f, y, z: (f.double().sigmoid() * (1 - f.double().sigmoid()) * z.double().square()).sum(),
    )


def poisson() -> Likelihood:
    """Counts with the logarithm of the rate as output, ``exp(f) - y f``, averaged over entries."""

    def score(f: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        rate = f.detach().float().exp()
        return (rate - torch.poisson(rate, generator=generator)).to(f.dtype)

    return Likelihood(
        "Poisson",
        lambda f, y: F.poisson_nll_loss(f.float(), _like(y, f).float(), reduction="sum"),
        lambda f, y: float(f.numel()),
        score,
        lambda f, y, z: (f.double().exp() * z.double().square()).sum(),
    )


_BY_NAME: dict[str, Callable[[], Likelihood]] = {
    "cross_entropy": cross_entropy,
    "next_token": lambda: cross_entropy(shift=True),
    "mse": squared_error,
    "binary_cross_entropy": binary_cross_entropy,
    "poisson": poisson,
}


def likelihood_of(loss: Any) -> Likelihood:
    """The likelihood behind a loss.

    Args:
        loss: a `Likelihood`; a name: ``cross_entropy``, ``next_token`` (targets shifted inside), ``mse``,
            ``binary_cross_entropy``, ``poisson``; PyTorch's module or function of one of these, averaged or summed.

    Raises:
        ValueError: where no sampler is known.

    Example:
        >>> likelihood_of(nn.CrossEntropyLoss()).name
        'cross entropy'
    """
    found: Likelihood | None = None
    if isinstance(loss, Likelihood):
        return loss
    if isinstance(loss, str) and loss in _BY_NAME:
        return _BY_NAME[loss]()
    if isinstance(loss, nn.CrossEntropyLoss):
        found = cross_entropy(loss.weight, loss.ignore_index, loss.label_smoothing)
    elif isinstance(loss, nn.MSELoss) or loss is F.mse_loss:
        found = squared_error()
    elif (isinstance(loss, nn.BCEWithLogitsLoss) and loss.weight is None and loss.pos_weight is None) or (
        loss is F.binary_cross_entropy_with_logits
    ):
        found = binary_cross_entropy()
    elif (isinstance(loss, nn.PoissonNLLLoss) and loss.log_input and not loss.full) or loss is F.poisson_nll_loss:
        found = poisson()
    elif loss is F.cross_entropy:
        found = cross_entropy()
    reduction = getattr(loss, "reduction", "mean")
    if found is None or reduction == "none":
        raise ValueError(
            f"`loss` must be one whose targets can be sampled from the model: {', '.join(_BY_NAME)}, the PyTorch loss of "
            f"one of these, or a `specgrad.probe.Likelihood` with your own sampler; got {loss!r}. Without one there is no "
            "unbiased curvature: gradients of the true labels do not give it."
        )
    return found  # a summed loss has the same ratios; decreases are given per unit
