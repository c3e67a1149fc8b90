"""What is compared between optimizers: validation losses, and what each group of layers gained."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from specgrad.gpt.model import Decoder


@torch.no_grad()
def sequence_losses(model: Decoder, windows: Int[Tensor, "windows window"], chunk: int = 16) -> Float[Tensor, " windows"]:
    """Mean cross-entropy of each validation window, in nats per byte."""
    losses = []
    for part in windows.split(chunk):
        part = part.to(model.head.weight.device)
        logits = model(part[:, :-1]).float()
        losses.append(F.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none").mean(dim=1))
    return torch.cat(losses).double().cpu()


@dataclass(frozen=True)
class Difference:
    """A mean difference and its standard error."""

    mean: float
    stderr: float


def paired_difference(first: Float[np.ndarray, " n"], second: Float[np.ndarray, " n"]) -> Difference:
    """``first - second`` over the same validation windows.

    The standard error is that of the mean of the paired differences: it says how well this text measures these two
    trained models, and nothing about other seeds.
    """
    difference = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    return Difference(float(difference.mean()), float(difference.std(ddof=1) / math.sqrt(len(difference))))


def share_of_gain(adamw: float, partial: float, full: float) -> float:
    """Share of the full improvement over AdamW that spectral updates of the MLP output matrices alone bring.

    Args:
        adamw: validation loss with AdamW everywhere.
        partial: with spectral updates on the MLP output matrices only.
        full: with spectral updates on every hidden matrix.

    Returns:
        ``(adamw - partial) / (adamw - full)``; NaN if the full update gained nothing.

    Example:
        >>> round(share_of_gain(3.9242, 3.7023, 3.5654), 3)
        0.618

    Source: the ablation quoted by Davis and Drusvyatskiy (arXiv 2512.04299) from Wang et al. (arXiv 2509.26030).
    """
    return (adamw - partial) / (adamw - full) if adamw > full else math.nan
