"""The orthogonalisation of ``torch.optim.Muon``, for trajectories that must agree with it."""

import torch
from jaxtyping import Float
from torch import Tensor


class TorchMuonPolar:
    """Quintic iteration in bfloat16 after division by the Frobenius norm, as PyTorch 2.13 does it.

    Not to be confused with `specgrad.linalg.polar_factor`: rounding the input to bfloat16 makes low-rank inputs leak, and
    its singular values end between 0.7 and 1.2.

    Args:
        coefficients: of x, x^3 and x^5.
        steps: number of iterations, below 100.
        eps: smallest Frobenius norm that is divided by.

    Raises:
        ValueError: if there are not three coefficients or ``steps`` is out of range.

    Source: Jordan et al., Muon (2024).
    """

    def __init__(
        self, coefficients: tuple[float, float, float] | None = None, steps: int | None = None, eps: float | None = None
    ) -> None:
        self.coefficients = (3.4445, -4.7750, 2.0315) if coefficients is None else coefficients
        self.steps = 5 if steps is None else steps
        self.eps = 1e-7 if eps is None else eps
        if len(self.coefficients) != 3:
            raise ValueError(f"`ns_coefficients` must be three numbers; got {self.coefficients}.")
        if not 0 < self.steps < 100:
            raise ValueError(f"`ns_steps` must be between 1 and 99; got {self.steps}.")

    def __call__(self, matrix: Float[Tensor, "batch m n"]) -> Float[Tensor, "batch m n"]:
        """The orthogonalised stack, in bfloat16 as in PyTorch."""
        return torch.stack([self._one(one) for one in matrix])

    def _one(self, matrix: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        a, b, c = self.coefficients
        tall = matrix.shape[0] > matrix.shape[1]
        x = matrix.bfloat16()
        x = x.T if tall else x
        x = x / x.norm().clamp(min=self.eps)
        for _ in range(self.steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if tall else x
