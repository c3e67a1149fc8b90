"""Losses as sums of functions of a few linear features of the scores.

The scores are ``G``, of shape (tokens, tokens, indices). A term of the loss sees n features, ``y_a = sum_ijk F_aijk G_ijk``,
and nothing else, so that its expectation is an integral over n Gaussian variables, whatever the number of scores.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from specgrad.aim.activations import Activation, Pointwise, activation_named

ScoreLoss = Callable[[Tensor], Tensor]
Derivatives = tuple[Float[Tensor, " batch"], Float[Tensor, "batch n"], Float[Tensor, "batch n n"]]

# Names of the squared difference.
SQUARED = ("squared", "mse")


@dataclass(frozen=True)
class SquaredDifference:
    """``weight (sum_k sign_k sigma(y_k))^2``: outputs of the students minus outputs of the teachers, squared.

    Attributes:
        activation: sigma.
        signs: +1 for a student's output, -1 for a teacher's.
        weight: factor in front.
    """

    activation: Activation
    signs: tuple[int, ...]
    weight: float = 1.0

    @property
    def degree(self) -> int | None:
        """Twice the activation's degree."""
        return None if self.activation.degree is None else 2 * self.activation.degree

    def value(self, y: Float[Tensor, "batch n"]) -> Float[Tensor, " batch"]:
        """The function at each row."""
        return self.weight * (self.activation.function(y) @ y.new_tensor(self.signs)) ** 2

    def derivatives(self, y: Float[Tensor, "batch n"]) -> Derivatives:
        """Value, gradient and Hessian at each row."""
        signs = y.new_tensor(self.signs)
        residual = self.activation.function(y) @ signs
        slopes = self.activation.first(y) * signs
        hessian = slopes[:, :, None] * slopes[:, None, :]
        hessian = hessian + torch.diag_embed(residual[:, None] * self.activation.second(y) * signs)
        twice = 2 * self.weight
        return self.weight * residual**2, twice * residual[:, None] * slopes, twice * hessian


@dataclass(frozen=True)
class SquaredSoftmax:
    """``|sum_k sign_k softmax(0, y_k)|^2``: a row's attention of the students minus that of the teachers, squared.

    Features are the row's scores minus that of its first token, token by token and in each token index by index.

    Attributes:
        tokens: entries of the row, one more than there are features of an index.
        signs: +1 for a student, -1 for a teacher.
    """

    tokens: int
    signs: tuple[int, ...]

    @property
    def degree(self) -> None:
        """No polynomial."""
        return None

    def value(self, y: Float[Tensor, "batch n"]) -> Float[Tensor, " batch"]:
        """The function at each row."""
        return (self._softmax(y) * y.new_tensor(self.signs)[:, None]).sum(1).square().sum(0)

    def derivatives(self, y: Float[Tensor, "batch n"]) -> Derivatives:
        """Value, gradient and Hessian at each row; by hand twenty times faster than automatically."""
        p, signs = self._softmax(y), self.signs
        residual = (p * y.new_tensor(signs)[:, None]).sum(1)
        q, excess = p[1:], residual[1:, None] - (residual[:, None] * p).sum(0)
        gradient = 2 * y.new_tensor(signs)[:, None] * q * excess
        products = [[(p[:, k] * p[:, m]).sum(0) for m in range(k + 1)] for k in range(len(signs))]
        places = [(a, k) for a in range(self.tokens - 1) for k in range(len(signs))]
        hessian = y.new_empty(len(places), len(places), len(y))
        for row, (a, k) in enumerate(places):
            for column, (b, m) in enumerate(places[: row + 1]):
                # Two slopes of the residual, and for one index its curvature.
                entry = products[max(k, m)][min(k, m)] - q[a, m] - q[b, k]
                if k == m:
                    entry = entry - signs[k] * (excess[a, k] + excess[b, k])
                entry = entry * q[b, m]
                if a == b:
                    entry = entry + (q[a, m] + signs[k] * excess[a, k] if k == m else q[a, m])
                hessian[row, column] = 2 * signs[k] * signs[m] * q[a, k] * entry
                hessian[column, row] = hessian[row, column]
        return residual.square().sum(0), gradient.flatten(0, 1).mT, hessian.permute(2, 0, 1)

    def _softmax(self, y: Float[Tensor, "batch n"]) -> Float[Tensor, "tokens indices batch"]:
        rows = y.mT.reshape(self.tokens - 1, len(self.signs), -1)
        return torch.softmax(torch.cat([torch.zeros_like(rows[:1]), rows]), dim=0)


@dataclass(frozen=True)
class Automatic:
    """Any function of features; derivatives by automatic differentiation.

    Attributes:
        function: maps rows of features to values.
        degree: degree if it is a polynomial.
    """

    function: Callable[[Tensor], Tensor]
    degree: int | None = None

    def value(self, y: Float[Tensor, "batch n"]) -> Float[Tensor, " batch"]:
        """The function at each row."""
        return self.function(y)

    def derivatives(self, y: Float[Tensor, "batch n"]) -> Derivatives:
        """Value, gradient and Hessian at each row."""
        with torch.enable_grad():
            at = y.detach().requires_grad_()
            value = self.function(at)
            (gradient,) = torch.autograd.grad(value.sum(), at, create_graph=True)
            rows = []
            for a in range(y.shape[1]):
                row = None
                if gradient.requires_grad:
                    (row,) = torch.autograd.grad(gradient[:, a].sum(), at, retain_graph=True, allow_unused=True)
                rows.append(torch.zeros_like(y) if row is None else row)
        return value.detach(), gradient.detach(), torch.stack(rows, dim=1).detach()


# A function of features: ``value`` and ``derivatives`` at rows, and the ``degree`` of a polynomial.
FeatureFunction = SquaredDifference | SquaredSoftmax | Automatic


@dataclass(frozen=True)
class Term:
    """A summand of the loss.

    Attributes:
        features: the linear map from scores to features, ``F``.
        function: what is done with them.
    """

    features: Float[np.ndarray, "n tokens tokens indices"]
    function: FeatureFunction


@dataclass(frozen=True)
class Loss:
    """A loss of the scores, as one function and as a sum of terms.

    Attributes:
        name: how it is called in tables.
        function: maps scores ``(..., tokens, tokens, indices)`` to losses ``(...)``.
        terms: summands over few features each.
        elementwise: the one function of each position's scores, where the loss is a sum of such.
    """

    name: str
    function: ScoreLoss
    terms: tuple[Term, ...]
    elementwise: SquaredDifference | None = None


def score_slope(loss: Loss, scores: Float[Tensor, "*batch tokens tokens indices"]) -> tuple[Tensor, Tensor]:
    """Losses ``(...)`` and their gradient in the scores, by hand for elementwise activations, else automatically."""
    if loss.elementwise is not None:
        sigma, signs = loss.elementwise.activation, scores.new_tensor(loss.elementwise.signs)
        residual = sigma.function(scores) @ signs
        return (residual**2).sum((-2, -1)), (2 * residual)[..., None] * sigma.first(scores) * signs
    with torch.enable_grad():
        at = scores.detach().requires_grad_()
        values = loss.function(at)
        (slope,) = torch.autograd.grad(values.sum(), at)
    return values.detach(), slope


def make_loss(activation: str | Pointwise, loss: str | ScoreLoss, tokens: int, signs: tuple[int, ...]) -> Loss:
    """Squared difference of the students' and the teachers' summed outputs, or any function of the scores.

    ``squared`` with an elementwise activation is ``sum_ij (sum_k sign_k sigma(G_ijk))^2``; with ``softmax`` the outputs are
    the rows' softmax.

    Args:
        activation: name or elementwise function; ``softmax`` acts on rows of scores. Ignored if ``loss`` is a function.
        loss: ``squared`` (or ``mse``, the same) or a function of scores ``(..., tokens, tokens, indices)``.
        tokens: number of tokens.
        signs: +1 for each student index, -1 for each teacher index.

    Raises:
        ValueError: for unknown names, or if the loss does not fit the numbers of tokens and indices.
    """
    if callable(loss):
        return _any_loss(loss, tokens, len(signs))
    if loss not in SQUARED:
        raise ValueError(f"`loss` of `aim` must be 'squared' (or 'mse') or a function of the scores; got {loss!r}.")
    if activation == "softmax":
        return _softmax_loss(tokens, signs)
    sigma = activation_named(activation)

    def function(scores: Float[Tensor, "*batch tokens tokens indices"]) -> Float[Tensor, "*batch"]:
        return ((sigma.function(scores) @ scores.new_tensor(signs)) ** 2).sum((-2, -1))

    terms = []
    for i in range(tokens):
        for j in range(tokens):
            features = np.zeros((len(signs), tokens, tokens, len(signs)))
            features[np.arange(len(signs)), i, j, np.arange(len(signs))] = 1
            terms.append(Term(features, SquaredDifference(sigma, signs)))
    return Loss(f"squared, {sigma.name}", function, tuple(terms), SquaredDifference(sigma, signs))


def _softmax_loss(tokens: int, signs: tuple[int, ...]) -> Loss:
    """Softmax ignores a common shift of a row, whose features are the differences to the diagonal, one less than tokens."""
    if tokens < 2:
        raise ValueError(f"`tokens` of `aim` must be >= 2 for softmax, which is constant on one token; got {tokens}.")
    indices = len(signs)

    def function(scores: Float[Tensor, "*batch tokens tokens indices"]) -> Float[Tensor, "*batch"]:
        return ((torch.softmax(scores, dim=-2) @ scores.new_tensor(signs)) ** 2).sum((-2, -1))

    terms = []
    for i in range(tokens):
        others = [j for j in range(tokens) if j != i]
        features = np.zeros((tokens - 1, indices, tokens, tokens, indices))
        for a, j in enumerate(others):
            features[a, np.arange(indices), i, j, np.arange(indices)] = 1
            features[a, np.arange(indices), i, i, np.arange(indices)] = -1
        flat = features.reshape(-1, tokens, tokens, indices)
        # Two tokens: the row is (1 - s, s) with s the logistic function of the difference.
        logistic = SquaredDifference(activation_named("logistic"), signs, 2.0)
        terms.append(Term(flat, logistic if tokens == 2 else SquaredSoftmax(tokens, signs)))
    return Loss("squared, softmax", function, tuple(terms))


def _any_loss(loss: ScoreLoss, tokens: int, indices: int) -> Loss:
    probe = torch.zeros(2, tokens, tokens, indices, dtype=torch.float64)
    try:
        shape = tuple(loss(probe).shape)
    except (RuntimeError, IndexError, ValueError) as error:
        raise ValueError(
            f"`loss` of `aim` must accept scores of shape (batch, {tokens}, {tokens}, {indices}): {error}"
        ) from error
    if shape != (2,):
        raise ValueError(f"`loss` of `aim` must map (batch, {tokens}, {tokens}, {indices}) to (batch,); it gave {shape}.")
    count = tokens * tokens * indices
    features = np.eye(count).reshape(count, tokens, tokens, indices)

    def of_features(y: Float[Tensor, "batch n"]) -> Float[Tensor, " batch"]:
        return loss(y.reshape(-1, tokens, tokens, indices))

    name = getattr(loss, "__name__", type(loss).__name__)
    return Loss(name, loss, (Term(features, Automatic(of_features)),))
