"""Sampled scores: sequences told apart, passes shared by all draws, checkpoints."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from specgrad.probe import measure_advantage


class Routed(nn.Module):
    """Marked tokens go to an expert: as many as sequences, but not one of each."""

    def __init__(self):
        super().__init__()
        self.expert = nn.Linear(5, 5, bias=False)
        self.head = nn.Linear(5, 3, bias=False)

    def forward(self, x):
        marked = x[..., 0] > 1.5
        x = x.index_put((marked,), self.expert(x[marked]).tanh())
        # Tokens of a sequence share a mean, so that terms between tokens matter.
        return self.head(x + x.mean(1, keepdim=True))


class TimeFirst(nn.Module):
    """As many tokens as sequences, and the tokens on the first axis inside."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5, bias=False)
        self.head = nn.Linear(5, 3, bias=False)

    def forward(self, x):
        x = self.inner(x.transpose(0, 1)).tanh().transpose(0, 1)
        return self.head(x + x.mean(1, keepdim=True))


@pytest.mark.parametrize("kind, tokens", [(Routed, 3), (TimeFirst, 8)])
def test_sequences_are_told_apart_where_a_layer_does_not_see_them_in_order(kind, tokens):
    torch.manual_seed(0)
    model = kind().double()
    x, y = (torch.randn(8, tokens, width, dtype=torch.float64) + 1 for width in (5, 3))
    x[..., 0] = 1
    x[::2, :2, 0] = 2
    sampled = measure_advantage(model, x, y, "mse", draws=250)
    exact = measure_advantage(model, x, y, "mse", method="gauss_newton")
    for got, true in zip(sampled, exact, strict=True):
        for side in ("euclidean", "spectral"):
            # Steps are slope over curvature; 2000 squares have an error of three per cent.
            assert got[f"step_{side}"] == pytest.approx(true[f"step_{side}"], rel=0.12)


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x):
        return self.head(self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant))


def test_checkpointed_layers_have_the_same_advantage_and_reentrant_ones_say_why_they_have_none():
    x, y = torch.randn(12, 5, 6, generator=torch.Generator().manual_seed(0)).requires_grad_(), torch.zeros(12, 5).long()
    found = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        found.append(measure_advantage(Checkpointed(reentrant), x, y, draws=3))
    plain, checkpointed, lost = found
    assert [row["advantage"] for row in plain] == pytest.approx([row["advantage"] for row in checkpointed], rel=1e-5)
    assert ["reentrant checkpoint" in row["reason"] for row in lost] == [True, True, False]


def test_all_draws_share_the_pass_that_gave_the_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    sizes = []
    model[0].register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    x, y = torch.randn(12, 6), torch.zeros(12).long()
    measure_advantage(model, x, y, draws=7)
    # The second one checks the scores of one sequence against its own gradient.
    assert sizes == [12, 1]
    sizes.clear()
    measure_advantage(model, x, y, draws=7, chunk=8)
    assert sizes == [8, 4, 8, 1, 4, 1]
