"""One seed, many independent named streams of random numbers."""

import hashlib
import operator
from typing import SupportsIndex

import torch


def stream(seed: SupportsIndex, *names: str | SupportsIndex, device: torch.device | str = "cpu") -> torch.Generator:
    """Generator of the stream called ``names`` under ``seed``.

    Streams depend on nothing but seed and names, so results do not change with the order in which parts of a run draw.

    Args:
        seed: the run's seed.
        names: what is drawn, for example ``"batches", 17``.
        device: device of the generator.

    Raises:
        TypeError: if the seed or a name is neither text nor an integer.

    Example:
        >>> torch.rand(1, generator=stream(0, "weights")).item() == torch.rand(1, generator=stream(0, "weights")).item()
        True
    """
    # Integers of NumPy and tensors name the same stream as Python's.
    path = (operator.index(seed), *(name if isinstance(name, str) else operator.index(name) for name in names))
    digest = hashlib.blake2b(repr(path).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
