"""Directions: what is added to the weight, times the learning rate, for a gradient G (minus the loss gradient)."""

import math
import warnings
from collections.abc import Mapping
from typing import Literal, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from specgrad.linalg import h_lambda, polar_factor
from specgrad.linalg.newton_schulz import polar_newton_schulz
from specgrad.linalg.polar import Method, Mode
from specgrad.linalg.remez import OddPolynomial
from specgrad.memory import theory
from specgrad.memory.checks import check_integer
from specgrad.memory.gradient import hessian_product, moments, start_hessian
from specgrad.memory.task import Task

Update = Literal["gd", "muon", "h_lambda", "newton", "whitened_muon"]
NewtonMode = Literal["auto", "solve", "pinv", "damped"]

# The step of Muon in common use, applied five times; it does not converge to 1.
QUINTIC = OddPolynomial((3.4445, -4.7750, 2.0315))

# Relative cut below which eigenvalues of M_v and Sigma_u count as zero: float64 rounding of a sum over a batch is 1e-15.
_CUT = 1e-12

_OPTIONS: dict[str, tuple[str, ...]] = {
    "gd": (),
    "muon": ("method", "mode", "quintic_steps"),
    "h_lambda": ("lam",),
    "newton": ("mode", "damping", "cg_steps", "cg_tolerance"),
    "whitened_muon": (),
}


def check_options(update: object, options: Mapping[str, object]) -> None:
    """Refuses settings that an update would ignore.

    Raises:
        ValueError: for a setting that belongs to another update.
    """
    if isinstance(update, str) and update not in _OPTIONS:
        raise ValueError(f"`update` must be one of {', '.join(_OPTIONS)}, or build an optimizer; got {update!r}.")
    known = _OPTIONS[update] if isinstance(update, str) else ()
    for name, value in options.items():
        if name not in known:
            whose = f"update {update!r}" if isinstance(update, str) else "a built optimizer"
            raise ValueError(f"`{name}` is no setting of {whose} (it has: {', '.join(known) or 'none'}); got {value!r}.")


def quintic_polar(matrix: Float[Tensor, "d d"], steps: int = 5) -> Float[Tensor, "d d"]:
    """The Newton-Schulz iteration of Muon in common use: ``steps`` times the same quintic, from ``G / |G|_F``.

    Singular values below about ``3.4445^-steps |G|_F`` stay small: it acts as a regularised polar factor.

    Args:
        matrix: the gradient; float64 is kept.
        steps: 5 in practice; 10 keep 94 to 100 % of the capacity up to dim 512.
    """
    return polar_newton_schulz(matrix, polynomials=(QUINTIC,) * steps, dtype=torch.float64, normalisation="frobenius")


def direction(
    task: Task,
    update: Update,
    gradient: Float[Tensor, "d d"],
    frequencies: Float[Tensor, " N"],
    weight: Float[Tensor, "d d"] | None = None,
    *,
    method: Method | Literal["quintic"] = "svd",
    mode: Mode | NewtonMode | None = None,
    quintic_steps: int = 5,
    lam: float | int | None = None,
    damping: float | int | None = None,
    cg_steps: int = 30,
    cg_tolerance: float | int = 1e-2,
) -> Float[Tensor, "d d"]:
    """The direction D of an update ``W + lr D``.

    Args:
        task: the task.
        update: ``gd`` (G), ``muon`` (polar factor of G), ``h_lambda`` (regularised polar factor), ``newton``
            (inverse Hessian times G) or ``whitened_muon`` (polar factor between whitened embeddings; ours).
        gradient: G, float64.
        frequencies: q of the batch, which Newton's Hessian is taken on.
        weight: where G was taken; None is W = 0.
        method: how Muon's polar factor is computed: a method of `specgrad.linalg.polar_factor`, or ``quintic`` for the
            Newton-Schulz iteration in common use. ``svd`` is exact and drops null directions.
        mode: for Muon the accuracy of `specgrad.linalg.polar_factor`, where a method has several (None: fast). For Newton at
            W = 0 how ``M_v`` is inverted: ``solve`` needs it to be regular, ``pinv`` cuts eigenvalues below 1e-12 of the
            largest, ``damped`` adds ``damping``; ``auto`` (None) is solve where M_v is regular and pinv elsewhere. At other
            W the Hessian is inverted by conjugate gradients, which need no such choice.
        quintic_steps: steps of ``quintic``.
        lam: resolution of ``h_lambda``; None takes `specgrad.memory.theory.resolution` of the task.
        damping: added to ``M_v`` by ``damped``, > 0; None is 0.1 of the theory's resolution.
        cg_steps: most products with the Hessian that Newton takes at W != 0.
        cg_tolerance: relative residual at which conjugate gradients stop.

    Raises:
        ValueError: for an unknown update or setting, or ``solve`` where ``M_v`` is singular. A singular ``Sigma_u``, which
            fewer than d + 1 outputs have, is inverted on its range.

    Cost: one decomposition of a d x d matrix; Newton ``4 N d^2`` at W = 0 and ``8 N^2 d`` per product elsewhere.

    Source: Kim, Nichani, Wu, Bietti and Lee (arXiv 2603.26554), sections 3 (Muon), 4.2 (Newton, equation 7).
    """
    if update not in get_args(Update):
        raise ValueError(f"`update` must be one of {', '.join(get_args(Update))}, or build an optimizer; got {update!r}.")
    if gradient.shape != (task.dim, task.dim):
        raise ValueError(f"`gradient` must have shape ({task.dim}, {task.dim}); got {tuple(gradient.shape)}.")
    if update == "gd":
        return gradient
    if update == "muon":
        if method == "quintic":
            return quintic_polar(gradient, quintic_steps)
        return polar_factor(gradient, method, cast(Mode, "fast" if mode is None else mode))
    if update == "h_lambda":
        return h_lambda(gradient, _resolution(task, frequencies) if lam is None else lam)
    if update == "whitened_muon":
        return _whitened_muon(task, gradient)
    mode = "auto" if mode is None else mode
    if mode not in get_args(NewtonMode):
        raise ValueError(f"`mode` of Newton must be one of {', '.join(get_args(NewtonMode))}; got {mode!r}.")
    if damping is not None and not (mode == "damped" and 0 < damping < math.inf):
        raise ValueError(f"`damping` of Newton must be finite and > 0, with `mode`='damped'; got {damping} and {mode!r}.")
    check_integer("memory.direction", "cg_steps", cg_steps)
    if cg_steps < 1:
        raise ValueError(f"`cg_steps` of Newton must be >= 1; got {cg_steps}.")
    if weight is not None and weight.any():
        return _newton_cg(task, gradient, weight, frequencies, cg_steps, cg_tolerance)
    if mode == "damped" and damping is None:
        damping = 0.1 * _resolution(task, frequencies)
    return _newton_at_start(task, gradient, frequencies, cast(NewtonMode, mode), damping)


def _resolution(task: Task, frequencies: Float[Tensor, " N"]) -> float:
    if task.alpha is None:
        raise ValueError("`lam` (or `damping`) has no default for measured frequencies; pass it, or `alpha` to the task.")
    # The smallest frequency in a batch is one over its size; in the population it is far below d^-alpha.
    seen = frequencies[frequencies > 0]
    batch = 1 / float(seen.min()) if frequencies is not task.frequencies and len(seen) else None
    return theory.resolution(task.dim, task.alpha, batch)


def _newton_at_start(
    task: Task, gradient: Float[Tensor, "d d"], q: Float[Tensor, " N"], mode: NewtonMode, damping: float | int | None
) -> Float[Tensor, "d d"]:
    """``Sigma_u^-1 G M_v^-1``."""
    sigma_u, m_v = start_hessian(task, q)
    values, vectors = torch.linalg.eigh(m_v)
    regular = bool(values[0] > _CUT * values[-1])
    if mode == "solve" and not regular:
        seen = int(torch.count_nonzero(q))
        raise ValueError(
            f"`mode`='solve' of Newton needs M_v of full rank {task.dim}; this batch has {seen} distinct items and rank "
            f"{int((values > _CUT * values[-1]).sum())}. Use a larger batch (about d^alpha), 'pinv' or 'damped'."
        )
    if mode == "solve" or (mode == "auto" and regular):
        right = torch.linalg.solve(m_v, gradient.T).T
    else:
        if mode == "damped":
            assert damping is not None
            inverse = 1 / (values.clamp(min=0) + damping)
        else:
            inverse = torch.where(values > _CUT * values[-1], 1 / values, 0)
        right = ((gradient @ vectors) * inverse) @ vectors.T
    return _solved(sigma_u, right)


def _solved(matrix: Float[Tensor, "d d"], right: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """``matrix^-1 right`` for a covariance; on its range where it is singular."""
    values, vectors = torch.linalg.eigh(matrix)
    kept = values > _CUT * values[-1]
    solution: Tensor = (
        torch.linalg.solve(matrix, right)
        if kept.all()
        else vectors[:, kept] @ ((vectors[:, kept].T @ right) / values[kept, None])
    )
    return solution


def _newton_cg(
    task: Task,
    gradient: Float[Tensor, "d d"],
    weight: Float[Tensor, "d d"],
    q: Float[Tensor, " N"],
    steps: int,
    tolerance: float | int,
) -> Float[Tensor, "d d"]:
    """Solves ``H[D] = G`` by conjugate gradients with the Hessian at the start, damped, as preconditioner.

    Directions without curvature, of items that are learned, are left alone: the iteration stops at the tolerance or where
    the curvature along its direction is lost in rounding.
    """
    sigma_u, m_v = start_hessian(task, q)
    m_v = m_v + 1e-6 * m_v.diagonal().mean() * torch.eye(task.dim).to(m_v)

    def precondition(residual: Tensor) -> Tensor:
        return _solved(sigma_u, torch.linalg.solve(m_v, residual.T).T)

    solution = torch.zeros_like(gradient)
    residual = gradient.clone()
    scaled = precondition(residual)
    along, energy = scaled.clone(), float((residual * scaled).sum())
    first = float(residual.norm())
    for _ in range(steps):
        product = hessian_product(task, along, weight, q)
        curvature = float((along * product).sum())
        if curvature <= 0:
            break
        solution += energy / curvature * along
        residual -= energy / curvature * product
        if float(residual.norm()) <= tolerance * first:
            break
        scaled = precondition(residual)
        energy, previous = float((residual * scaled).sum()), energy
        along = scaled + energy / previous * along
    left = float(residual.norm()) / max(first, math.ulp(0))
    if left > tolerance:
        warnings.warn(
            f"Newton's equation was solved to a relative residual of {left:.1e} in {steps} products with the Hessian "
            f"(asked: {tolerance:.1e}); raise `cg_steps` for more.",
            stacklevel=3,
        )
    return solution


def _whitened_muon(task: Task, gradient: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """``L pol(L G R) R`` with ``L = Sigma_u^-1/2`` and ``R = C_v^-1/2``, ``C_v = V^T V / N``: Muon between white embeddings.

    Inverse square roots of the second moments make the update's logits independent of any linear change of u and v.
    """
    left = _inverse_root(moments(task)[1])
    right = _inverse_root(start_hessian(task, torch.full_like(task.frequencies, 1 / task.num_items))[1])
    return left @ polar_factor(left @ gradient @ right, "svd") @ right


def _inverse_root(matrix: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """Inverse square root of a covariance, on its range."""
    values, vectors = torch.linalg.eigh(matrix)
    root: Tensor = (vectors * torch.where(values > _CUT * values[-1], values.rsqrt(), 0)) @ vectors.T
    return root
