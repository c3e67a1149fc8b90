"""Two gloo processes see the statistics of one: of the whole batch and the whole matrix, not of a shard."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
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


def levels(rank, world, results, wrap=DistributedDataParallel):
    model = wrap(Model())
    part = ids().chunk(world)[rank]
    probe = Probe(model)
    results[rank] = (
        [r["advantage"] for r in probe.measure_advantage(part, part.roll(1, 1), draws=100)],
        [r["step_spectral"] for r in probe.measure_advantage(part, part.roll(1, 1), method="gauss_newton")],
        [r["gain"] for r in probe.measure_gain(part, part.roll(1, 1))],
        refusal(probe, part[: len(part) - rank]),
    )


def levels_sharded(rank, world, results):
    levels(rank, world, results, in_shards)


def levels_sharded_half_precision(rank, world, results):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    levels(rank, world, results, lambda model: in_shards(model, mp_policy=policy))


def in_shards(model, **settings):
    fully_shard([model.norm, model.head], **settings)
    fully_shard(model, **settings)
    return model


def refusal(probe, part):
    try:
        probe.measure_advantage(part, part)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("job", [levels, levels_sharded, levels_sharded_half_precision])
def test_levels_two_and_three_of_two_processes_are_those_of_the_whole_batch(job, tmp_path):
    probe = Probe(Model())
    whole = ids(), ids().roll(1, 1)
    advantages = [r["advantage"] for r in probe.measure_advantage(*whole, draws=100)]
    steps = [r["step_spectral"] for r in probe.measure_advantage(*whole, method="gauss_newton")]
    gains = [r["gain"] for r in probe.measure_gain(*whole)]
    for got in run(job, 2, tmp_path):
        assert got[0] == pytest.approx(advantages, rel=0.25)
        assert got[1] == pytest.approx(steps, rel=1e-3)
        assert got[2] == pytest.approx(gains, rel=1e-3, nan_ok=True)
        assert "equally many sequences on every rank" in got[3]


def trained(rank, world, results):
    outcomes = []
    for measuring in (False, True):
        model = in_shards(Model())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        part = ids().chunk(world)[rank]
        probe = Probe(model, every=2)
        seen = []
        with probe:
            for step in range(4):
                loss_of(model, part).backward()
                seen.append(len(probe.step()))
                optimizer.step()
                optimizer.zero_grad()
                if measuring and step % 2:
                    probe.measure_advantage(part, part, draws=2)
                    probe.measure_gain(part, part, pattern="inner")
                    with torch.no_grad():
                        model(part)  # leaves the outermost parameters gathered
                    probe.measure_advantage(part, part, draws=2)
        outcomes.append((seen, [p.full_tensor().tolist() for p in model.parameters()]))
    results[rank] = outcomes


def test_measuring_a_sharded_model_leaves_its_training_as_it_was(tmp_path):
    for plain, measured_too in run(trained, 2, tmp_path):
        assert plain == measured_too
        assert plain[0] == [4, 0, 4, 0]


def in_tensor_shards(rank, world, results):
    model = Model()
    parallelize_module(model, init_device_mesh("cpu", (world,)), {"inner": ColwiseParallel()})
    try:
        Probe(model, pattern="head").measure_advantage(ids(), ids())
    except ValueError as error:
        results[rank] = str(error)


def test_levels_two_and_three_refuse_a_model_whose_modules_expect_shards(tmp_path):
    for message in run(in_tensor_shards, 2, tmp_path):
        assert "must hold whole matrices here" in message
        assert "inner.weight" in message
