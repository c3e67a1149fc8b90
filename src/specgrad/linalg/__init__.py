"""Pure functions on matrices, batched over leading axes: polar factors, norms and soft ranks."""

from specgrad.linalg.polar import polar_factor
from specgrad.linalg.ranks import nuclear_norm, nuclear_rank, singular_values, spectral_norm, stable_rank

__all__ = ["nuclear_norm", "nuclear_rank", "polar_factor", "singular_values", "spectral_norm", "stable_rank"]
