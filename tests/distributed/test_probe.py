"""Two gloo processes see the statistics of one: of the whole batch and the whole matrix, not of a shard."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from specgrad import Probe
from tests.distributed.test_fsdp import run


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, ids):
        return self.head(self.norm(torch.relu(self.inner(self.embedding(ids)))))


def ids():
    return torch.randint(11, (8, 5), generator=torch.Generator().manual_seed(0))


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.roll(1, 1).flatten())


KEYS = ("tokens", "stable_rank", "nuclear_rank", "noise_to_signal", "outlier_share", "gradient_norm")


def measured(probe, model, batch, parts=1):
    with probe:
        for part in batch.chunk(parts):
            (loss_of(model, part) / parts).backward()
        return {r["layer"]: [r[key] for key in KEYS] for r in probe.step()}


def under_ddp(rank, world, results):
    model = DistributedDataParallel(Model())
    results[rank] = measured(Probe(model, every=1), model, ids().chunk(world)[rank])


def under_ddp_with_accumulation(rank, world, results):
    model = DistributedDataParallel(Model())
    probe = Probe(model, every=1)
    first, second = ids().chunk(world)[rank].chunk(2)
    with probe:
        with model.no_sync():
            (loss_of(model, first) / 2).backward()
        (loss_of(model, second) / 2).backward()
        model.zero_grad()
        results[rank] = {r["layer"]: [r[key] for key in KEYS] for r in probe.step()}


def under_fsdp(rank, world, results):
    model = Model()
    for part in (model.inner, model.head):
        fully_shard(part)
    fully_shard(model)
    results[rank] = measured(Probe(model, every=1), model, ids().chunk(world)[rank], parts=1)


def given_a_group(rank, world, results):
    model = Model()
    wrapped = DistributedDataParallel(model)
    probe = Probe(model, every=1, group=torch.distributed.group.WORLD)
    with probe:
        loss_of(wrapped, ids().chunk(world)[rank]).backward()
        results[rank] = {r["layer"]: [r[key] for key in KEYS] for r in probe.step()}


@pytest.mark.parametrize("job", [under_ddp, under_ddp_with_accumulation, under_fsdp, given_a_group])
def test_two_processes_report_the_statistics_of_one(job, tmp_path):
    model = Model()
    expected = measured(Probe(model, every=1, exact=True), model, ids())
    for got in run(job, 2, tmp_path):
        assert set(got) == set(expected)
        for layer, values in got.items():
            assert values == pytest.approx(expected[layer], rel=1e-4), layer


def levels(rank, world, results):
    model = DistributedDataParallel(Model())
    part = ids().chunk(world)[rank]
    probe = Probe(model)
    results[rank] = (
        [r["advantage"] for r in probe.measure_advantage(part, part.roll(1, 1), draws=100)],
        [r["step_spectral"] for r in probe.measure_advantage(part, part.roll(1, 1), method="gauss_newton")],
        [r["gain"] for r in probe.measure_gain(part, part.roll(1, 1))],
        refusal(probe, part[: len(part) - rank]),
    )


def refusal(probe, part):
    try:
        probe.measure_advantage(part, part)
    except ValueError as error:
        return str(error)


def test_levels_two_and_three_of_two_processes_are_those_of_the_whole_batch(tmp_path):
    probe = Probe(Model())
    whole = ids(), ids().roll(1, 1)
    advantages = [r["advantage"] for r in probe.measure_advantage(*whole, draws=100)]
    steps = [r["step_spectral"] for r in probe.measure_advantage(*whole, method="gauss_newton")]
    gains = [r["gain"] for r in probe.measure_gain(*whole)]
    for got in run(levels, 2, tmp_path):
        assert got[0] == pytest.approx(advantages, rel=0.25)
        assert got[1] == pytest.approx(steps, rel=1e-3)
        assert got[2] == pytest.approx(gains, rel=1e-3, nan_ok=True)
        assert "equally many sequences on every rank" in got[3]


def sharded_levels(rank, world, results):
    model = Model()
    fully_shard(model)
    try:
        Probe(model).measure_advantage(ids(), ids())
    except ValueError as error:
        results[rank] = str(error)


def test_levels_two_and_three_refuse_sharded_matrices(tmp_path):
    for message in run(sharded_levels, 2, tmp_path):
        assert "must hold whole matrices" in message
