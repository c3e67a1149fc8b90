"""A small byte-level decoder: pre-norm attention and MLP blocks without biases or norm gains."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

Mlp = Literal["relu2", "swiglu"]
Positions = Literal["rotary", "learned"]

VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """Dimensions of a decoder: blocks, width, attention heads and context length in tokens."""

    depth: int
    width: int
    heads: int
    context: int


SIZES = {
    "tiny": Size(depth=2, width=64, heads=2, context=64),
    "small": Size(depth=3, width=128, heads=4, context=128),
    "medium": Size(depth=6, width=256, heads=8, context=256),
    "large": Size(depth=12, width=768, heads=12, context=512),
}


class Attention(nn.Module):
    """Causal multi-head attention with normalised queries and keys."""

    def __init__(self, size: Size, positions: Positions) -> None:
        super().__init__()
        self.heads = size.heads
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, size.width, bias=False)
        self.value = nn.Linear(size.width, size.width, bias=False)
        self.output = nn.Linear(size.width, size.width, bias=False)
        self.rotary = positions == "rotary"
        cos, sin = _rotary_angles(size.context, size.width // size.heads)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Float[Tensor, "batch time width"]) -> Float[Tensor, "batch time width"]:
        """Mixes values over earlier positions."""
        batch, time, width = x.shape
        q, k, v = (f(x).view(batch, time, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        if self.rotary:
            q, k = self._rotate(q), self._rotate(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, time, width))
        return projected

    def _rotate(self, x: Float[Tensor, "batch heads time half2"]) -> Float[Tensor, "batch heads time half2"]:
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


def _rotary_angles(context: int, head_width: int) -> tuple[Float[Tensor, "context half"], Float[Tensor, "context half"]]:
    """Cosines and sines of rotary positions with base 10,000 (Su et al., arXiv 2104.09864, equation 15)."""
    rates = 10_000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), rates)
    return angles.cos().float(), angles.sin().float()


class SquaredReluMlp(nn.Module):
    """``W_2 relu(W_1 x)^2`` with four times the width inside: W_1 is ``up``, W_2 ``down``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Applies the MLP."""
        out: Tensor = self.down(F.relu(self.up(x)).square())
        return out


class SwigluMlp(nn.Module):
    """``W_2 (silu(W_gate x) o W_1 x)``, inner width 8/3 rounded down to a multiple of 16 for equal parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = max(16, 8 * width // 3 // 16 * 16)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Applies the MLP."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention and MLP, each added to its RMS-normalised input."""

    def __init__(self, size: Size, mlp: Mlp, positions: Positions) -> None:
        super().__init__()
        self.attention = Attention(size, positions)
        self.mlp = SquaredReluMlp(size.width) if mlp == "relu2" else SwigluMlp(size.width)

    def forward(self, x: Float[Tensor, "batch time width"]) -> Float[Tensor, "batch time width"]:
        """Applies the block."""
        x = x + self.attention(F.rms_norm(x, x.shape[-1:]))
        out: Tensor = x + self.mlp(F.rms_norm(x, x.shape[-1:]))
        return out


class Decoder(nn.Module):
    """Byte-level language model with an untied head.

    Args:
        size: dimensions.
        mlp: ``relu2`` (squared ReLU) or ``swiglu`` (gated).
        positions: ``rotary`` or ``learned``.
    """

    def __init__(self, size: Size, mlp: Mlp = "relu2", positions: Positions = "rotary") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.position = nn.Embedding(size.context, size.width) if positions == "learned" else None
        self.blocks = nn.ModuleList(Block(size, mlp, positions) for _ in range(size.depth))
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time vocabulary"]:
        """Logits of the next byte at every position."""
        x = self.embedding(ids)
        if self.position is not None:
            x = x + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(F.rms_norm(x, x.shape[-1:]))
        return logits
