"""Level 2: the predicted advantage of a spectral step, with real curvature instead of two bounds.

On one block moved alone, a quadratic model of the loss with curvature q gives the best step along -D the decrease
``<G, D>^2 / (2 q(D))``. The advantage is the ratio of that decrease along ``polar(G)`` to the one along G:

    R_q = (|G|_*^2 / q(polar G)) / (|G|_F^4 / q(G)),   q(D) = (1/N) E sum_sequences (sum_{t in sequence} g_t . D a_t)^2

with g_t the gradients at the layer's outputs of the summed loss at labels sampled from the model: an unbiased estimate of
the Gauss-Newton form, since draws in different sequences are independent with mean zero. Each draw costs one backward pass
to the layers' outputs and serves all blocks and both directions.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from specgrad.probe.directions import Target, block_records, chosen_layers, find_targets
from specgrad.probe.gauss_newton import gauss_newton_records
from specgrad.probe.layers import Layer, find_layers
from specgrad.probe.likelihoods import likelihood_of
from specgrad.probe.objective import Forward, Objective, default_forward, untouched
from specgrad.probe.scores import sampled_scores

# Sequences times draws: the standard error of the log advantage is about one over its square root, 6 %, against a spread
# of 16 to 40 % between the blocks of a network.
ENOUGH = 256


def measure_advantage(
    model: nn.Module,
    inputs: Any,
    targets: Tensor,
    loss: Any = "cross_entropy",
    *,
    forward: Forward | None = None,
    pattern: str | None = None,
    method: str = "fisher",
    draws: int | None = None,
    chunk: int = 16,
    gains: bool = False,
    seed: int = 0,
    step: int = 0,
    layers: list[Layer] | None = None,
    group: Any = None,
) -> list[dict[str, Any]]:
    """Predicted one-step advantage of a spectral over a Euclidean step, block by block, at the present weights.

    The model is evaluated in eval mode (no dropout) on the batch given; weights, gradients, buffers and random numbers are
    left as they were. A model under ``fully_shard`` is gathered on every rank meanwhile. Early in training nothing predicts
    well; ``method="gauss_newton"`` says so.

    Args:
        model: the model.
        inputs: a tensor, tuple or mapping of tensors with independent sequences along the first axis.
        targets: likewise.
        loss: see `specgrad.probe.likelihood_of`.
        forward: (model, inputs) -> outputs; default: call the model, take ``.logits``.
        pattern: measure only layers whose name contains this regular expression.
        method: ``fisher`` (all blocks at once, sampled) or ``gauss_newton`` (exact, two forward-mode passes and two forward
            passes per block: for chosen blocks).
        draws: label draws; default: enough for 256 sequences times draws.
        chunk: sequences per forward pass.
        gains: include norm gains (sign against gradient step).
        seed: seed of the sampled labels.
        step: recorded with the result.
        layers: as `specgrad.probe.layers.find_layers` gives them; default: all of the model.
        group: process group whose ranks hold equal parts of the batch and the same weights.

    Returns:
        One record per block: ``layer``, ``advantage``, ``log_error`` (standard error of its logarithm),
        ``decrease_euclidean`` and ``decrease_spectral`` (predicted, in units of the loss), ``step_euclidean`` and
        ``step_spectral`` (the predicted best multiples of G and polar(G)), ``method``, ``sequences``, ``draws``,
        ``rho_euclidean`` and ``rho_spectral`` (realised over predicted decrease at those steps; NaN for ``fisher``) and
        ``reason``: why there is no value, else empty.

    Raises:
        TypeError: for targets that are no tensor.
        ValueError: for a loss without sampler, an unknown method, targets that do not fit the outputs, or settings out of
            range.

    Cost: in forward-and-backward passes of the batch, about 2 (the gradient, polar factors, products with the inputs) and
        0.55 per draw, 0.3 more where the batch takes several forward passes; weights that no hook sees (attention's in_proj,
        stacked experts) one per draw on top. Memory: one pass's activations and, per watched layer, two tensors like its
        output.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(64, 6), torch.randn(64, 4)
        >>> (record,) = measure_advantage(nn.Linear(6, 4, bias=False), x, y, "mse", method="gauss_newton")
        >>> record["layer"], round(record["rho_spectral"], 4)
        ('weight', 1.0)

    Source: ours; Martens, New insights and perspectives on the natural gradient method (2020), section 9, for Fisher and
        Gauss-Newton.
    """
    if method not in ("fisher", "gauss_newton"):
        raise ValueError(f"`method` of `measure_advantage` must be fisher or gauss_newton; got {method!r}.")
    if draws is not None and not (isinstance(draws, int) and draws >= 1):
        raise ValueError(f"`draws` of `measure_advantage` must be an integer >= 1; got {draws!r}.")
    objective = Objective(model, inputs, targets, likelihood_of(loss), forward or default_forward, chunk, group)
    layers = find_layers(model)[0] if layers is None else layers
    with untouched(model):
        chosen = chosen_layers(layers, pattern, gains)
        if method == "gauss_newton":
            targets_of = find_targets(chosen, objective)
            return [record for target in targets_of for record in gauss_newton_records(target, objective, step)]
        if not objective.equal_parts():
            raise ValueError(f"`targets` must hold equally many sequences on every rank; got {objective.sequences} here.")
        draws = draws or math.ceil(ENOUGH / len(objective.gathered(torch.zeros(objective.sequences))))
        scores = sampled_scores(chosen, objective, draws, seed)
    return [record for target, found in scores for record in _records(target, found, objective, draws, step)]


def _records(target: Target, scores: Tensor, objective: Objective, draws: int, step: int) -> list[dict[str, Any]]:
    records = []
    for i, (_, slopes, about) in enumerate(block_records(target, step)):
        euclidean, spectral = (objective.gathered(s.flatten()).square() for s in scores[i])
        # Mean over draws of the sum over sequences, per unit of the loss.
        q = [float(s.sum()) / draws / target.units for s in (euclidean, spectral)]
        values = {"advantage": math.nan, "log_error": math.nan}
        decreases = [s * s / (2 * c) if c > 0 else math.nan for s, c in zip(slopes, q, strict=True)]
        steps = [s / c if c > 0 else math.nan for s, c in zip(slopes, q, strict=True)]
        if not about["reason"] and not min(q) > 0:
            about["reason"] = "its sampled curvature is zero"
        if not about["reason"]:
            spread = euclidean / euclidean.mean() - spectral / spectral.mean()
            error = float(spread.std() / spread.numel() ** 0.5) if spread.numel() > 1 else math.nan
            values = {"advantage": decreases[1] / decreases[0], "log_error": error}
        records.append(
            about | values
            | {"decrease_euclidean": decreases[0], "decrease_spectral": decreases[1]}
            | {"step_euclidean": steps[0], "step_spectral": steps[1], "method": "fisher"}
            | {"sequences": len(euclidean) // draws, "draws": draws, "rho_euclidean": math.nan, "rho_spectral": math.nan}
        )  # fmt: skip
    return records
