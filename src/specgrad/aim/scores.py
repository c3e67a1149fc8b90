"""Samples, scores and gradients of tied and direct attention, with a leading axis of seeds.

Axes: s seeds, b samples, i and j tokens, d coordinates, r columns, k indices. Another parametrisation needs the same two
things: scores from a batch, and gradients of the weights from the loss's gradient in the scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from specgrad.aim.losses import score_slope
from specgrad.aim.task import Task

Scores = Float[Tensor, "s b i i k"]


class Batch:
    """A buffer of fresh tokens, ``x`` of shape (seeds, samples, tokens, dim), drawn seed by seed from its own stream."""

    def __init__(self, task: Task, seeds: int, batch_size: int, device: torch.device, dtype: torch.dtype) -> None:
        assert task.dim is not None
        self.x = torch.empty(seeds, batch_size, task.tokens, task.dim, device=device, dtype=dtype)
        self.covariance = torch.from_numpy(task.potential.token_covariance).to(device=device, dtype=dtype)
        self.mix: Tensor | None = None
        if not np.array_equal(task.potential.token_covariance, np.eye(task.tokens)):
            # A symmetric root serves singular covariances as well.
            values, vectors = np.linalg.eigh(task.potential.token_covariance)
            root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
            self.mix = torch.from_numpy(root).to(device=device, dtype=dtype)

    def draw(self, generators: Sequence[torch.Generator]) -> None:
        """Fills the buffer."""
        for part, generator in zip(self.x, generators, strict=True):
            part.normal_(generator=generator)
        if self.mix is not None:
            self.x.copy_(self.mix @ self.x)

    @property
    def flat(self) -> Float[Tensor, "s rows d"]:
        """Tokens of all samples under each other."""
        return self.x.flatten(1, 2)


@dataclass(eq=False)
class Model:
    """Weights of several seeds.

    Attributes:
        task: what is learned.
        trained: weights of each trained index, (seeds, dim, columns).
        frozen: S of each other index, (seeds, dim, dim), or its eigenvalues (seeds, dim) where the run's coordinates are its
            eigenvectors.
        projected: what the last scores need again for the gradients.
    """

    task: Task
    trained: dict[int, Tensor]
    frozen: dict[int, Tensor]
    projected: dict[int, Tensor]

    @classmethod
    def start(cls, task: Task, seeds: Sequence[int], device: torch.device, dtype: torch.dtype, *, rotate: bool) -> "Model":
        """Draws the weights.

        With ``rotate`` and one symmetric frozen matrix, everything is expressed in its eigenvectors: isotropic tokens and
        SGD know no coordinates, and its scores then cost no product. An optimizer that looks at entries would notice.
        """
        trained: dict[int, list[Tensor]] = {k: [] for k in task.trained}
        frozen: dict[int, list[Tensor]] = {k: [] for k in range(task.indices) if k not in task.trained}
        for seed in seeds:
            weights = task.weights(seed)
            only = next(iter(frozen)) if len(frozen) == 1 else None
            if rotate and only is not None and torch.equal(weights[only], weights[only].mT):
                values, vectors = torch.linalg.eigh(weights[only])
                weights = [vectors.mT @ w if task.attention == "tied" else vectors.mT @ w @ vectors for w in weights]
                weights[only] = values
            for k, w in enumerate(weights):
                (trained if k in trained else frozen)[k].append(w)
        stacked = {k: torch.stack(w).to(device=device, dtype=dtype).contiguous() for k, w in trained.items()}
        still = {k: torch.stack(w).to(device=device, dtype=dtype) for k, w in frozen.items()}
        return cls(task, stacked, still, {})

    @property
    def seeds(self) -> int:
        """Number of seeds."""
        return len(next(iter((self.trained | self.frozen).values())))

    def matrices(self, seed: int) -> list[Float[Tensor, "d d"]]:
        """Every S of the seed in this place, float64, in the run's coordinates."""
        found = []
        for k in range(self.task.indices):
            w = (self.trained | self.frozen)[k][seed].double()
            if k in self.trained and self.task.attention == "tied":
                w = w @ w.mT
            found.append(torch.diag(w) if w.ndim == 1 else w)
        return found

    def scores(self, batch: Batch) -> Scores:
        """``G_ijk = (x_i^T S_k x_j - C_ij Tr S_k)/sqrt(d)``."""
        x, parts = batch.x, []
        for k in range(self.task.indices):
            if k in self.trained and self.task.attention == "tied":
                w = self.trained[k]
                y = torch.matmul(batch.flat, w).view(*x.shape[:3], -1)
                self.projected[k] = y
                products, trace = _pairs(y, y), (w * w).sum((1, 2))
            else:
                s = (self.trained | self.frozen)[k]
                if s.ndim == 2:
                    products, trace = _pairs(x * s[:, None, None, :], x), s.sum(1)
                else:
                    y = torch.matmul(batch.flat, s).view_as(x)
                    products, trace = _pairs(y, x), s.diagonal(dim1=1, dim2=2).sum(1)
            parts.append(products - batch.covariance * trace[:, None, None, None])
        return torch.stack(parts, dim=-1).mul_(float(x.shape[-1]) ** -0.5)

    def loss_and_slope(self, scores: Scores) -> tuple[Float[Tensor, "s b"], Scores]:
        """Loss of each sample and its gradient in the scores."""
        return score_slope(self.task.potential.scores, scores)

    def gradients(self, batch: Batch, slope: Scores) -> dict[int, Tensor]:
        """Gradient of the mean loss plus ``gamma/(2d) |W|_F^2``, by trained index."""
        found = {}
        for k, w in self.trained.items():
            columns, own = self._pull_back(batch, slope, k)
            gradient = torch.matmul(batch.flat.mT, columns)
            found[k] = gradient + self._shrink(w, own)
        return found

    def descend(self, batch: Batch, slope: Scores, lr: float) -> None:
        """A step of SGD in place, without writing the gradient out."""
        for k, w in self.trained.items():
            columns, own = self._pull_back(batch, slope, k)
            w -= lr * self._shrink(w, own)
            w.baddbmm_(batch.flat.mT, columns, alpha=-lr)

    def _pull_back(self, batch: Batch, slope: Scores, k: int) -> tuple[Float[Tensor, "s rows c"], Float[Tensor, " s"]]:
        """What the tokens are multiplied with, and the coefficient of the centring term ``Tr S``."""
        x = batch.x
        g = slope[..., k] * (float(x.shape[-1]) ** -0.5 / x.shape[1])
        own = (g * batch.covariance).sum((1, 2, 3))
        tied = self.task.attention == "tied"
        # Tied: d/dW of x_i^T W W^T x_j is x_i y_j^T + x_j y_i^T. Direct: d/dS of x_i^T S x_j is x_i x_j^T.
        factor = g + g.mT if tied else g
        right = self.projected[k] if tied else x
        if x.shape[2] == 1:
            return factor[:, :, 0] * right[:, :, 0], own
        return torch.matmul(factor, right).flatten(1, 2), own

    def _shrink(self, w: Tensor, own: Float[Tensor, " s"]) -> Tensor:
        """Gradient of the centring term and of the weight decay."""
        decay = self.task.weight_decay / w.shape[1]
        if self.task.attention == "tied":
            return w * (decay - 2 * own)[:, None, None]
        return w * decay - own[:, None, None] * torch.eye(w.shape[1], device=w.device, dtype=w.dtype)


def _pairs(left: Float[Tensor, "s b i d"], right: Float[Tensor, "s b i d"]) -> Float[Tensor, "s b i i"]:
    """Inner products of all pairs of tokens; few tokens are faster one pair at a time than as many tiny products."""
    tokens = left.shape[2]
    if tokens > 3:
        return torch.matmul(left, right.mT)
    rows = [[(left[:, :, i] * right[:, :, j]).sum(-1) for j in range(tokens)] for i in range(tokens)]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)
