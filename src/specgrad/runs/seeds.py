"""One seed, many independent named streams of random numbers."""

import hashlib

import torch


def stream(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Generator of the stream called ``names`` under ``seed``.

    Streams depend on nothing but seed and names, so results do not change with the order in which parts of a run draw.

    Args:
        seed: the run's seed.
        names: what is drawn, for example ``"batches", 17``.
        device: device of the generator.

    Example:
        >>> torch.rand(1, generator=stream(0, "weights")).item() == torch.rand(1, generator=stream(0, "weights")).item()
        True
    """
    digest = hashlib.blake2b(repr((seed, *names)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
