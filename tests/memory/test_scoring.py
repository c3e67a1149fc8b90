import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgrad import memory
from specgrad.memory import scoring


def random_weight(dim, seed, rank=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(dim, dim, generator=generator, dtype=dtype)
    if rank is not None:
        weight[rank:] = 0
    return weight


@settings(max_examples=40, deadline=None)
@given(
    items=st.integers(2, 1500),
    dim=st.integers(1, 12),
    seed=st.integers(0, 1000),
    identity=st.floats(0, 3),
    rank=st.sampled_from([None, 1, 3]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_pruned_scoring_equals_the_definition(items, dim, seed, identity, rank, dtype):
    drawn = memory.Task(items, dim, 1.5, seed=seed, dtype=dtype)
    # Equal embeddings on both sides make many items recovered, so that survivors meet every block.
    u = identity * drawn.embeddings + drawn.unembeddings
    task = memory.Task.from_arrays(u, drawn.embeddings, drawn.frequencies)
    weight = random_weight(dim, seed, rank, dtype) * 0.3 + torch.eye(dim, dtype=dtype)
    assert torch.equal(memory.recovered(task, weight), memory.recovered_by_definition(task, weight, rows=97))


def test_survivors_meet_every_block_and_blocks_need_not_divide_the_items(monkeypatch):
    monkeypatch.setattr(scoring, "_FIRST_BLOCKS", (3, 7))
    monkeypatch.setattr(scoring, "_BLOCK", 11)
    v = memory.Task(1000, 40, 1.5).embeddings
    task = memory.Task.from_arrays(v, v, torch.ones(1000))
    mask = memory.recovered(task, torch.eye(40))
    assert mask.sum() > 900
    assert torch.equal(mask, memory.recovered_by_definition(task, torch.eye(40)))


def test_zero_recovers_nothing():
    assert not memory.recovered(memory.Task(50, 4, 1.5), torch.zeros(4, 4)).any()


def test_ties_lose():
    v = memory.Task(300, 30, 1.5).embeddings
    weight = torch.eye(30, dtype=torch.float64)
    unique = memory.Task.from_arrays(v, v, torch.ones(300))
    assert memory.recovered(unique, weight)[:2].all()
    for dtype in (torch.float32, torch.float64):
        u = v.to(dtype).clone()
        u[250] = u[0]
        tied = memory.recovered(memory.Task.from_arrays(u, v.to(dtype), torch.ones(300)), weight)
        assert not tied[0]
        assert not tied[250]
        assert tied[1]


@pytest.mark.parametrize("dim", [64, 128])
def test_float32_and_streamed_scoring_find_the_same_items(dim):
    settings_ = {"num_items": 20_000, "dim": dim, "alpha": 1.5, "seed": 5}
    weight = memory.one_step(memory.Task(**settings_), "muon")
    expected = memory.recovered(memory.Task(**settings_), weight)
    assert torch.equal(memory.recovered(memory.Task(**settings_, dtype=torch.float32), weight), expected)
    assert torch.equal(memory.recovered(memory.Task(**settings_, storage="stream"), weight), expected)


def test_a_positive_margin_is_recovery():
    task = memory.Task(3000, 32, 1.5)
    weight = memory.one_step(task, "muon")
    got = memory.margins(task, weight, torch.arange(200))
    assert torch.equal(got > 0, memory.recovered(task, weight)[:200])


def test_metrics_of_a_mask():
    mask = torch.zeros(30, dtype=torch.bool)
    mask[:9] = True
    mask[10:20] = True
    p = memory.Task(30, 1, 2.0).frequencies
    got = memory.capacity_of(mask, p, shares=(0.9, 0.5, 1.0))
    # 19 of the first 20 and 19 of the first 21 are at least 90 %; 19 of 30 at least 50 %.
    assert got == {"count": 19, "prefix": 9, "top90": 21, "top50": 30, "top100": 9, "accuracy": p[mask].sum().item()}
    nothing = memory.capacity_of(torch.zeros(5, dtype=torch.bool), p[:5])
    assert nothing == {"count": 0, "prefix": 0, "top90": 0, "accuracy": 0.0}


def test_shares_outside_the_unit_interval_are_refused(unchecked_types):
    with pytest.raises(ValueError, match=r"`shares` of `memory.capacity` must be in \(0, 1\]; got 1.5"):
        memory.capacity_of(torch.ones(3, dtype=torch.bool), torch.ones(3), shares=(1.5,))


def test_memory_of_scoring_does_not_grow_with_the_square_of_items():
    # 2e5 items: the N x N logits would take 160 GB.
    task = memory.Task(200_000, 8, 1.5, dtype=torch.float32)
    assert memory.capacity(task, memory.one_step(task, "muon"))["count"] < 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recovery_does_not_depend_on_the_size_of_the_weight(dtype):
    task = memory.Task(600, 16, 1.5, dtype=dtype)
    weight = memory.one_step(task, "muon")
    expected = memory.recovered(task, weight)
    assert expected.sum() > 3
    for size in (1e-300, 1e-60, 1e60, 1e300):
        assert torch.equal(memory.recovered(task, size * weight), expected)


def test_margins_come_in_the_order_of_the_items():
    task = memory.Task(600, 16, 1.5)
    weight = memory.one_step(task, "muon")
    everyone = memory.margins(task, weight, torch.arange(600))
    items = torch.tensor([5, 3, 3, 599, 0])
    assert torch.equal(memory.margins(task, weight, items), everyone[items])
    for bad in ([-1], [600]):
        with pytest.raises(ValueError, match=r"`items` of `memory.margins` must be in \[0, 600\)"):
            memory.margins(task, weight, torch.tensor(bad))
