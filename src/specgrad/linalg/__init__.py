"""Pure functions on matrices, batched over leading axes: polar factors, spectral functions, norms and soft ranks."""

from specgrad.linalg.estimators import estimate_nuclear_rank, estimate_spectral_norm, estimate_stable_rank
from specgrad.linalg.functions import h_lambda, h_lambda_derivative, signal_derivative, spectral_function
from specgrad.linalg.polar import Choice, choose_method, polar_factor
from specgrad.linalg.ranks import nuclear_norm, nuclear_rank, singular_values, spectral_norm, stable_rank

__all__ = [
    "Choice",
    "choose_method",
    "estimate_nuclear_rank",
    "estimate_spectral_norm",
    "estimate_stable_rank",
    "h_lambda",
    "h_lambda_derivative",
    "nuclear_norm",
    "nuclear_rank",
    "polar_factor",
    "signal_derivative",
    "singular_values",
    "spectral_function",
    "spectral_norm",
    "stable_rank",
]
