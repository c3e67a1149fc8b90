"""What is learned: the next byte of a real text."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from specgrad.data import Text, shakespeare
from specgrad.gpt.model import SIZES, Decoder, Mlp, Positions, Size
from specgrad.runs.seeds import stream

# The last tenth of the text is held out, in the order of the text: no window of it overlaps a training window.
_HELD_OUT = 0.1

# A standard error over validation windows needs more than one.
_LEAST_WINDOWS = 2


@dataclass(frozen=True)
class Task:
    """Language modelling of a text by bytes.

    Attributes:
        text: the text; the last tenth is held out for validation.
        size: ``tiny``, ``small``, ``medium`` or ``large``, see `specgrad.gpt.SIZES`.
        mlp: ``relu2`` (squared ReLU) or ``swiglu``.
        positions: ``rotary`` or ``learned``.
        batch_size: sequences per step; each has the context length of ``size``.
        seed: seed of initial weights and batches.

    Raises:
        ValueError: for a setting out of range, or a text too short for one batch and one validation window.

    Example:
        >>> Task(size="tiny").validation_windows(2).shape
        torch.Size([2, 65])
    """

    text: Text | None = None
    size: str = "small"
    mlp: Mlp = "relu2"
    positions: Positions = "rotary"
    batch_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("size", SIZES), ("mlp", get_args(Mlp)), ("positions", get_args(Positions))):
            if getattr(self, name) not in allowed:
                got = getattr(self, name)
                raise ValueError(f"`{name}` of `gpt.Task` must be one of {', '.join(allowed)}; got {got!r}.")
        if self.batch_size < 1:
            raise ValueError(f"`batch_size` of `gpt.Task` must be >= 1; got {self.batch_size}.")
        window = self.dimensions.context + 1
        needed = self.batch_size * window
        if self._train.numel() < needed or self._held_out.numel() < _LEAST_WINDOWS * window:
            least = max(int(needed / (1 - _HELD_OUT)), int(_LEAST_WINDOWS * window / _HELD_OUT)) + 2
            raise ValueError(
                f"`text` of `gpt.Task` must hold a batch of {self.batch_size} windows of {window} bytes in its first 90 % "
                f"and {_LEAST_WINDOWS} windows in the rest, that is at least {least:,} bytes; got {self._tokens.numel():,}."
            )

    @property
    def dimensions(self) -> Size:
        """Dimensions that ``size`` names."""
        return SIZES[self.size]

    @cached_property
    def _tokens(self) -> UInt8[Tensor, " length"]:
        return (self.text or shakespeare()).tokens()

    @property
    def _train(self) -> UInt8[Tensor, " length"]:
        return self._tokens[: int(self._tokens.numel() * (1 - _HELD_OUT))]

    @property
    def _held_out(self) -> UInt8[Tensor, " length"]:
        return self._tokens[int(self._tokens.numel() * (1 - _HELD_OUT)) :]

    def config(self) -> dict[str, Any]:
        """JSON-ready settings, with the text named by its checksum; the seed is apart."""
        text = self.text or shakespeare()
        return {
            "text": text.name, "text_sha256": text.sha256, "size": self.size, "mlp": self.mlp,
            "positions": self.positions, "batch_size": self.batch_size,
        }  # fmt: skip

    def model(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
        """A fresh decoder; its weights depend on the seed alone and the global random state is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(stream(self.seed, "weights").get_state())
            model = Decoder(self.dimensions, self.mlp, self.positions)
        return model.to(device=device, dtype=dtype)

    def batch(self, step: int) -> Int[Tensor, "batch window"]:
        """Training windows of one step, each a context and the byte after it; a function of seed and step."""
        window = self.dimensions.context + 1
        high = self._train.numel() - window + 1
        starts = torch.randint(high, (self.batch_size, 1), generator=stream(self.seed, "batches", step))
        return self._train[starts + torch.arange(window)].long()

    def validation_windows(self, count: int) -> Int[Tensor, "windows window"]:
        """Up to ``count`` windows that do not overlap, evenly spread over the held-out text; the same for every seed."""
        window = self.dimensions.context + 1
        available = self._held_out.numel() // window
        count = min(count, available)
        starts = torch.arange(count) * available // count * window
        return self._held_out[starts[:, None] + torch.arange(window)].long()


def loss(model: Decoder, windows: Int[Tensor, "batch window"]) -> Float[Tensor, ""]:
    """Mean cross-entropy of the next byte, in nats."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
