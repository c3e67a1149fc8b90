"""Cumulants of the scores' features at finite dimension: quadratic forms of Gaussian vectors."""

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


def feature_forms(
    features: Float[np.ndarray, "n i i k"], matrices: Sequence[Float[Tensor, "d d"]], covariance: Float[np.ndarray, "i i"]
) -> Float[Tensor, "n rows rows"]:
    """``sym(A_a) (C (x) I)`` of each feature ``y_a = X^T A_a X``, X the tokens under each other.

    Cost: memory for n matrices of (tokens d) x (tokens d).
    """
    stack = torch.stack([m.double() for m in matrices])
    n, tokens, _, _ = features.shape
    dim = stack.shape[-1]
    blocks = torch.einsum("aijk,kde->aidje", torch.from_numpy(features), stack).reshape(n, tokens * dim, tokens * dim)
    symmetric = (blocks + blocks.mT).div_(2 * dim**0.5)
    sigma = torch.kron(torch.from_numpy(covariance), torch.eye(dim, dtype=torch.float64))
    return symmetric if np.array_equal(covariance, np.eye(tokens)) else torch.matmul(symmetric, sigma)


def third_cumulants(forms: Float[Tensor, "n rows rows"]) -> Float[np.ndarray, "n n n"]:
    """``kappa_abc = 8 Tr(B_a B_b B_c)``: the two cyclic orders of three forms have the same trace."""
    n, size = len(forms), forms.shape[-1]
    pairs = torch.einsum("aij,bjk->abik", forms, forms).reshape(n * n, size * size)
    return (8 * (pairs @ forms.mT.reshape(n, -1).T)).reshape(n, n, n).numpy()


def fourth_cumulants(forms: Float[Tensor, "n rows rows"]) -> Float[np.ndarray, "n n n n"]:
    """``kappa_abcd = 8 sum over the six cyclic orders Tr(B_a B_p B_q B_r)``."""
    n, size = len(forms), forms.shape[-1]
    pairs = torch.einsum("aij,bjk->abik", forms, forms)
    # Tr(B_a B_b B_c B_d) = <(B_a B_b)^T, B_c B_d>
    traces = (pairs.mT.reshape(n * n, -1) @ pairs.reshape(n * n, size * size).T).reshape(n, n, n, n).numpy()
    total = sum(np.transpose(traces, (0, *(1 + np.array(order)))) for order in permutations(range(3)))
    return 8 * np.asarray(total)
