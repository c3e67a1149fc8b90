"""Inputs of a convolution: one row per output position and one feature per kernel entry, never unfolded.

Products with the unfolded matrix are convolutions of the input; products with its transpose are kernel gradients.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from specgrad.linalg.estimators import Operator
from specgrad.probe.inputs import in_range

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_KERNEL_GRADIENT = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}


class Patches:
    """The patches that one group of channels of a convolution sees; stride, dilation and padding are the layer's.

    Args:
        inputs: batch x channels x space, or without a batch axis.
        module: the convolution.
        group: which of its groups of channels.

    Source: the unfolded input of a convolution as the matrix A of Davis and Drusvyatskiy (arXiv 2512.04299), section 4.
    """

    def __init__(self, inputs: Float[Tensor, "..."], module: Convolution, group: int) -> None:
        self.kernel = module.kernel_size
        self.axes = len(self.kernel)
        x = inputs.detach()
        x = x[None] if x.ndim == self.axes + 1 else x
        width = x.shape[1] // module.groups
        x = in_range(x[:, group * width : (group + 1) * width])
        self.x = _padded(x, module)
        self.settings: dict[str, Any] = {"stride": module.stride, "dilation": module.dilation}
        self.channels, self.features = width, width * math.prod(self.kernel)
        space = [
            (length - d * (k - 1) - 1) // s + 1
            for length, k, s, d in zip(self.x.shape[2:], self.kernel, module.stride, module.dilation, strict=True)
        ]
        self.out = (self.x.shape[0], *space)
        self.tokens = math.prod(self.out)

    def operator(self) -> Operator:
        """Products by convolution and by kernel gradient."""
        return Operator(self.tokens, self.features, self._apply, self._back, self.x.dtype, self.x.device)

    def _apply(self, vectors: Float[Tensor, "k b"]) -> Float[Tensor, "n b"]:
        weight = vectors.mT.reshape(-1, self.channels, *self.kernel)
        out: Tensor = _CONVOLVE[self.axes](self.x, weight, **self.settings)
        return out.movedim(1, -1).reshape(self.tokens, -1)

    def _back(self, vectors: Float[Tensor, "n b"]) -> Float[Tensor, "k b"]:
        grad = vectors.reshape(*self.out, -1).movedim(-1, 1).contiguous()
        size = (vectors.shape[1], self.channels, *self.kernel)
        found: Tensor = _KERNEL_GRADIENT[self.axes](self.x, size, grad, **self.settings)
        return found.reshape(vectors.shape[1], -1).mT

    def gram(self) -> Float[Tensor, "k k"]:
        """Gram matrix, one kernel entry at a time: the columns of an entry are a strided slice of the input."""
        gram = self.x.new_empty(self.features, self.features)
        entries = self.features // self.channels
        for entry, offset in enumerate(torch.cartesian_prod(*map(torch.arange, self.kernel)).reshape(entries, -1).tolist()):
            where = [
                slice(o * d, o * d + s * (n - 1) + 1, s)
                for o, d, s, n in zip(offset, self.settings["dilation"], self.settings["stride"], self.out[1:], strict=True)
            ]
            columns = self.x[(slice(None), slice(None), *where)].movedim(1, -1).reshape(self.tokens, -1)
            gram[:, entry::entries] = self._back(columns)
        return gram

    def total(self) -> Float[Tensor, " k"]:
        """Sum of the patches."""
        return self._back(self.x.new_ones(self.tokens, 1))[:, 0]

    def row_squares(self) -> Float[Tensor, " n"]:
        """Squared norm of each patch."""
        ones = self.x.new_ones(1, self.channels, *self.kernel)
        squares: Tensor = _CONVOLVE[self.axes](self.x.square(), ones, **self.settings)
        return squares.reshape(-1)

    def row(self, index: int) -> Float[Tensor, " k"]:
        """One patch."""
        image, *place = (int(i) for i in torch.unravel_index(torch.tensor(index), self.out))
        where: list[int | slice] = [image, slice(None)]
        where += [
            slice(p * s, p * s + d * (k - 1) + 1, d)
            for p, s, d, k in zip(place, self.settings["stride"], self.settings["dilation"], self.kernel, strict=True)
        ]
        return self.x[tuple(where)].reshape(-1)


def _padded(x: Tensor, module: Convolution) -> Tensor:
    if module.padding == "valid":
        return x
    sides: list[int] = []
    for axis in reversed(range(len(module.kernel_size))):
        if module.padding == "same":
            whole = module.dilation[axis] * (module.kernel_size[axis] - 1)
            sides += [whole // 2, whole - whole // 2]
        else:
            sides += [int(module.padding[axis])] * 2
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, sides, mode=mode)
