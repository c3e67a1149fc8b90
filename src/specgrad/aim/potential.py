"""The potential Phi: the population loss as a function of finitely many order parameters, and its matrix gradients."""

from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float

from specgrad.aim.activations import Pointwise
from specgrad.aim.closed_forms import closed_form, closed_moments
from specgrad.aim.losses import FeatureFunction, Loss, ScoreLoss, SquaredDifference, make_loss
from specgrad.aim.mehler import moments_by_series, series_for
from specgrad.aim.quadrature import Moments, check_covariance, grid_for, moments_by_sampling, moments_on_grid, square_root
from specgrad.aim.smooth import has_kinks

Route = Literal["hessian", "autodiff"]
Matrix = Float[np.ndarray, "k k"]


@dataclass(frozen=True)
class Evaluation:
    """Everything the dynamics need to know about the loss at one state.

    Attributes:
        value: Phi.
        a: matrix gradient with respect to Omega.
        b: matrix gradient with respect to Psi.
        mean: gradient with respect to the scaled traces m.
        value_error: standard error of ``value``; 0 for closed forms and grids.
        error: standard error of the entries of ``a + b``.
        routes: how each group of terms was integrated.
    """

    value: float
    a: Matrix
    b: Matrix
    mean: Float[np.ndarray, " k"]
    value_error: float
    error: Matrix
    routes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Group:
    """Terms that are the same function of features with the same law.

    ``along`` and ``across`` give the features' covariance, ``Sigma_ab = sum_kl along_abkl Omega_kl + across_abkl Psi_kl``,
    and ``means`` their means, ``sum_k means_ak m_k``.
    """

    function: FeatureFunction
    along: Float[np.ndarray, "n2 k2"]
    across: Float[np.ndarray, "n2 k2"]
    means: Float[np.ndarray, "n k"]
    count: int


@dataclass(frozen=True, eq=False)
class Potential:
    """Phi, the limit of the population loss, for any loss of the scores and any token covariance.

    ``Phi(Psi, Omega) = E L(G)`` with G Gaussian, ``Cov(G_ijk, G_i'j'l) = C_ii' C_jj' Omega_kl + C_ij' C_ji' Psi_kl``. For
    symmetric matrices (tied attention) ``Psi = Omega = q``.

    Expectations come from closed forms (h1, h2, h3 without mean), from Hermite series of one variable (elementwise
    activations and softmax on two tokens, squared loss), from Gauss-Hermite rules on the few features that a term of the
    loss sees, or from randomised quasi-Monte-Carlo. Nodes are added until two rules agree to ``tol``.

    Attributes:
        activation: ``h1``, ``h2``, ``h3`` (Hermite), ``tanh``, ``logistic``, ``softmax`` (over rows of scores) or a
            differentiable elementwise function.
        loss: ``squared``, or a function that maps scores ``(batch, tokens, tokens, indices)`` to ``(batch,)``.
        tokens: number of tokens L.
        covariance: token covariance C, PSD; None is the identity.
        signs: +1 for each student, -1 for each teacher; their number is the number of indices K.
        tol: relative agreement of two Gauss-Hermite rules at which the smaller one is taken.
        seed: seed of quasi-Monte-Carlo.

    Raises:
        ValueError: for an unknown name, a C that is not PSD or does not fit, a loss that does not fit.

    Example:
        >>> potential = Potential("h2")
        >>> potential.value([[0.5, 0.25], [0.25, 0.5]])
        1.5
        >>> potential.gamma([[0.5, 0.25], [0.25, 0.5]]).tolist()
        [[4.0, -2.0], [-2.0, 4.0]]

    Source: attention-indexed models, Theorem 1 and equation (11).
    """

    activation: str | Pointwise = "h1"
    loss: str | ScoreLoss = "squared"
    tokens: int = 1
    covariance: object = None
    signs: tuple[int, ...] = (1, -1)
    tol: float = 1e-9
    seed: int = 0

    def __post_init__(self) -> None:
        if not (isinstance(self.tokens, Integral) and self.tokens >= 1):
            raise ValueError(f"`tokens` of `aim.Potential` must be an integer >= 1; got {self.tokens!r}.")
        if not 0 < self.tol < 1:
            raise ValueError(f"`tol` of `aim.Potential` must lie between 0 and 1; got {self.tol}.")
        if not self.signs or not set(self.signs) <= {1, -1}:
            raise ValueError(f"`signs` of `aim.Potential` must hold +1 and -1 only, one per index; got {self.signs}.")
        _ = self.token_covariance, self.scores

    @cached_property
    def token_covariance(self) -> Float[np.ndarray, "tokens tokens"]:
        """C as an array."""
        if self.covariance is None:
            return np.eye(self.tokens)
        c = np.asarray(self.covariance, dtype=float)
        if c.shape != (self.tokens, self.tokens):
            raise ValueError(
                f"`covariance` of `aim.Potential` must have shape ({self.tokens}, {self.tokens}); got {c.shape}."
            )
        if not np.isfinite(c).all():
            raise ValueError("`covariance` of `aim.Potential` must be finite; it holds NaN or infinities.")
        lowest = np.linalg.eigvalsh((c + c.T) / 2)[0]
        if not np.allclose(c, c.T) or lowest < -1e-10:
            raise ValueError(
                f"`covariance` of `aim.Potential` must be symmetric and PSD; got smallest eigenvalue {lowest:.3g}"
                f"{'' if np.allclose(c, c.T) else ' of an asymmetric matrix'}."
            )
        return c

    @cached_property
    def scores(self) -> Loss:
        """The loss as a function of scores and as a sum of terms."""
        return make_loss(self.activation, self.loss, self.tokens, self.signs)

    @property
    def indices(self) -> int:
        """Number of indices K."""
        return len(self.signs)

    def value(self, q: object, omega: object = None, mean: object = None) -> float:
        """Phi at order parameters.

        Args:
            q: matrix ``tr(S_k S_l)``, shape (K, K); it stands for Psi if ``omega`` is given.
            omega: matrix ``tr(S_k S_l^T)``, if the S are not symmetric.
            mean: scaled traces ``m_k = Tr(S_k)/sqrt(d)`` of an uncentred model; None for a centred one.
        """
        return float(self.evaluate(q, omega, mean).value)

    def gamma(self, q: object, route: str = "hessian") -> Matrix:
        """The matrix gradient of Phi(q): ``dPhi = sum_kl Gamma_kl dq_kl`` with ``q_12`` and ``q_21`` counted separately.

        Hence ``Gamma_12`` is half the derivative with respect to the symmetric variable ``q_12``.

        Args:
            q: matrix ``tr(S_k S_l)``, shape (K, K), PSD.
            route: ``hessian`` is ``1/2 sum (C_ii' C_jj' + C_ij' C_ji') E d2L/dG_ijk dG_i'j'l``; ``autodiff`` differentiates
                Phi through the Cholesky factor of the scores' covariance, which must then be positive definite.

        Raises:
            ValueError: for a loss that is not twice differentiable, or a q that is not PSD (polynomials in closed form take
                any q, as truncated theories ask for).
        """
        if route not in get_args(Route):
            raise ValueError(f"`route` of `aim.Potential.gamma` must be one of {', '.join(get_args(Route))}; got {route!r}.")
        if route == "autodiff":
            from specgrad.aim.autodiff import gamma_by_autodiff

            return gamma_by_autodiff(self, self._matrix(q, "q"))
        matrix = self._matrix(q, "q")
        # Theories ask for this a thousand times per solution, so the bookkeeping of `evaluate` is skipped.
        total = np.zeros(self.indices**2)
        for group, both in zip(self.groups, self._symmetric_laws, strict=True):
            n = len(group.means)
            found, _ = self._moments(group, (both @ matrix.ravel()).reshape(n, n), np.zeros(n), centred=True)
            total += found.hessian.ravel() @ both * (group.count / 2)
        return total.reshape(matrix.shape)

    def evaluate(self, psi: object, omega: object = None, mean: object = None) -> Evaluation:
        """Phi and its matrix gradients ``A = grad_Omega Phi``, ``B = grad_Psi Phi`` and the gradient in the means.

        Args:
            psi: ``tr(S_k S_l)``, shape (K, K).
            omega: ``tr(S_k S_l^T)``; None if the same.
            mean: ``m_k = Tr(S_k)/sqrt(d)``; None if zero.

        Source: attention-indexed models, Theorem 4 and appendix E.
        """
        psi_matrix = self._matrix(psi, "q")
        omega_matrix = psi_matrix if omega is None else self._matrix(omega, "omega")
        means = None if mean is None else np.asarray(mean, dtype=float)
        if means is not None and means.shape != (self.indices,):
            raise ValueError(f"`mean` of `aim.Potential` must have shape ({self.indices},); got {means.shape}.")
        a, b = np.zeros(self.indices**2), np.zeros(self.indices**2)
        slope, error = np.zeros(self.indices), np.zeros(self.indices**2)
        value, value_variance, routes = 0.0, 0.0, []
        for group in self.groups:
            n = len(group.means)
            sigma = (group.along @ omega_matrix.ravel() + group.across @ psi_matrix.ravel()).reshape(n, n)
            centre = np.zeros(n) if means is None else group.means @ means
            found, route = self._moments(group, sigma, centre, centred=means is None)
            hessian = found.hessian.ravel() * (group.count / 2)
            a += hessian @ group.along
            b += hessian @ group.across
            slope += group.count * (found.gradient @ group.means)
            value += group.count * found.value
            value_variance += (group.count * found.value_error) ** 2
            if not isinstance(found.hessian_error, float):
                spread = found.hessian_error.ravel() * (group.count / 2)
                error = np.hypot(error, spread @ np.abs(group.along + group.across))
            routes.append(route)
        shape = (self.indices, self.indices)
        return Evaluation(
            value, a.reshape(shape), b.reshape(shape), slope, value_variance**0.5, error.reshape(shape), tuple(routes)
        )

    @cached_property
    def term_groups(self) -> tuple[_Group, ...]:
        """The law of each term's features, in the order of the loss's terms."""
        c, k = self.token_covariance, self.indices
        found = []
        for term in self.scores.terms:
            f = term.features
            n = len(f)
            along = np.einsum("aijk,ip,jq,bpql->abkl", f, c, c, f, optimize=True).reshape(n * n, k * k)
            across = np.einsum("aijk,iq,jp,bpql->abkl", f, c, c, f, optimize=True).reshape(n * n, k * k)
            found.append(_Group(term.function, along, across, np.einsum("aijk,ij->ak", f, c), 1))
        return tuple(found)

    @cached_property
    def groups(self) -> tuple[_Group, ...]:
        """Terms of the loss, equal ones counted together."""
        groups: list[_Group] = []
        for term in self.term_groups:
            for place, other in enumerate(groups):
                if _same_law(term, other):
                    groups[place] = replace(other, count=other.count + 1)
                    break
            else:
                groups.append(term)
        return tuple(groups)

    @cached_property
    def _symmetric_laws(self) -> list[Float[np.ndarray, "n2 k2"]]:
        """The map from ``q = Psi = Omega`` to the features' covariance, of each group."""
        return [group.along + group.across for group in self.groups]

    @cached_property
    def _rules(self) -> dict[tuple[int, int, bool], tuple[int | None, float]]:
        return {}

    def _matrix(self, q: object, name: str) -> Matrix:
        matrix = q.detach().cpu().numpy() if isinstance(q, torch.Tensor) else np.asarray(q, dtype=float)
        if matrix.shape != (self.indices, self.indices):
            raise ValueError(
                f"`{name}` of `aim.Potential` must have shape ({self.indices}, {self.indices}); got {matrix.shape}."
            )
        return matrix.astype(float)

    def _moments(
        self, group: _Group, sigma: Matrix, centre: Float[np.ndarray, " n"], *, centred: bool
    ) -> tuple[Moments, str]:
        name = closed_form(group.function) if centred else None
        if name is not None:
            return closed_moments(name, sigma[0, 0], sigma[0, 1], sigma[1, 1]), "closed"
        self.check_smooth()
        rule, error = self._rule(group, sigma, centre)
        if isinstance(group.function, SquaredDifference) and rule is not None:
            check_covariance(sigma)
            found, route = moments_by_series(group.function, centre, sigma, rule), f"Hermite series {rule}"
        elif rule is not None:
            found, route = moments_on_grid(group.function, centre, square_root(sigma), rule), f"Gauss-Hermite {rule}"
        else:
            return moments_by_sampling(group.function, centre, square_root(sigma), self.seed), "quasi-Monte-Carlo"
        if error > 0:
            found = replace(found, value_error=error, hessian_error=np.full_like(found.hessian, error))
        return found, route

    def check_smooth(self) -> None:
        """Refuses a loss whose Hessian has no expectation that quadrature could find.

        Raises:
            ValueError: for a loss that jumps, whose slope jumps, or that is not finite.
        """
        if self._kinks:
            raise ValueError(
                "`loss` of `aim.Potential` must be twice differentiable, since its expected Hessian drives the dynamics; "
                f"{self.scores.name} jumps, or its slope does. Use a smooth version of it."
            )

    @cached_property
    def _kinks(self) -> bool:
        return any(has_kinks(group.function, len(group.means)) for group in self.groups)

    def _rule(self, group: _Group, sigma: Matrix, centre: Float[np.ndarray, " n"]) -> tuple[int | None, float]:
        """Nodes per variable for features of this size, None where no affordable number is accurate, and the rule's error.

        A polynomial's is known; others are decided once per half octave of the largest variance, at a covariance of that
        size with correlated features, so that it does not depend on what was evaluated before.
        """
        if group.function.degree is not None:
            return group.function.degree // 2 + 1, 0.0
        if isinstance(group.function, SquaredDifference):
            size = float(sigma.diagonal().max() + (centre**2).max())
        else:
            size = float(np.linalg.eigvalsh(sigma)[-1]) + float(centre @ centre)
        octave = int(np.ceil(2 * np.log2(max(size, 1e-3))))
        key = (self.groups.index(group), octave, bool(centre.any()))
        if key not in self._rules:
            about = 2.0 ** (octave / 2), key[2], len(centre), self.tol
            if isinstance(group.function, SquaredDifference):
                self._rules[key] = series_for(group.function, *about)
            else:
                self._rules[key] = grid_for(group.function, *about)
        return self._rules[key]


def _same_law(one: _Group, other: _Group) -> bool:
    if one.function != other.function or one.along.shape != other.along.shape:
        return False
    pairs = ((one.along, other.along), (one.across, other.across), (one.means, other.means))
    return all(np.allclose(x, y, atol=1e-14) for x, y in pairs)
