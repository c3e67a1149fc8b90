"""Activations of a score and their two derivatives."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

Pointwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Activation:
    """A function of one score, with the two derivatives that the potential's gradient needs.

    Attributes:
        name: how it is called in tables.
        function: the activation, elementwise.
        first: its derivative.
        second: its second derivative.
        degree: degree of a polynomial, None for anything else.
    """

    name: str
    function: Pointwise
    first: Pointwise
    second: Pointwise
    degree: int | None = None


def _logistic_first(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 - s)


def _logistic_second(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 - s) * (1 - 2 * s)


def _tanh_first(z: Tensor) -> Tensor:
    return 1 - torch.tanh(z) ** 2


def _tanh_second(z: Tensor) -> Tensor:
    t = torch.tanh(z)
    return -2 * t * (1 - t**2)


# h1, h2, h3 are the first Hermite polynomials with unit norm under the standard Gaussian.
ACTIVATIONS = {
    "h1": Activation("h1", lambda z: z, torch.ones_like, torch.zeros_like, 1),
    "h2": Activation(
        "h2", lambda z: (z**2 - 1) / math.sqrt(2), lambda z: math.sqrt(2) * z, lambda z: torch.full_like(z, math.sqrt(2)), 2
    ),
    "h3": Activation(
        "h3",
        lambda z: (z**3 - 3 * z) / math.sqrt(6),
        lambda z: (3 * z**2 - 3) / math.sqrt(6),
        lambda z: math.sqrt(6) * z,
        3,
    ),
    "tanh": Activation("tanh", torch.tanh, _tanh_first, _tanh_second),
    "logistic": Activation("logistic", torch.sigmoid, _logistic_first, _logistic_second),
}


def activation_named(activation: str | Pointwise) -> Activation:
    """The activation of that name, or one made from a differentiable elementwise function by automatic differentiation.

    Raises:
        ValueError: for an unknown name, or what is not an elementwise function of tensors.

    Example:
        >>> activation_named("h2").function(torch.tensor([1.0, -1.0])).tolist()
        [0.0, 0.0]
        >>> round(float(activation_named(torch.sin).second(torch.tensor(0.5))), 4)
        -0.4794
    """
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            names = ", ".join([*ACTIVATIONS, "softmax"])
            raise ValueError(f"`activation` of `aim` must be one of {names} or a function of a tensor; got {activation!r}.")
        return ACTIVATIONS[activation]
    if not callable(activation) or not _elementwise(activation):
        raise ValueError(f"`activation` of `aim` must be a name or an elementwise function of a tensor; got {activation!r}.")
    name = getattr(activation, "__name__", type(activation).__name__)
    first = _derivative(activation)
    return Activation(name, activation, first, _derivative(first))


def _elementwise(function: Pointwise) -> bool:
    probe = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    try:
        return function(probe).shape == probe.shape
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False


def _derivative(function: Pointwise) -> Pointwise:
    def derivative(z: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        with torch.enable_grad():
            at = z if z.requires_grad else z.detach().requires_grad_()
            values = function(at)
            if not values.requires_grad:
                return torch.zeros_like(z)
            (slope,) = torch.autograd.grad(values.sum(), at, create_graph=True, allow_unused=True)
        if slope is None:
            return torch.zeros_like(z)
        return slope if z.requires_grad else slope.detach()

    return derivative
