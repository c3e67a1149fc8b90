"""Two and four gloo processes on the CPU against one process."""

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from specgrad.linalg import polar_factor
from specgrad.optim import Blocks, Muon, param_groups


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3, bias=False), nn.Linear(3, 5))


def train(model, optimizer, steps):
    for step in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_weights(model):
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def fsdp_equals_one_process(rank, world, results):
    model = small_model()
    fully_shard(model)
    optimizer = Muon(param_groups(model), lr=0.05, mode="exact", nonfinite="skip")
    train(model, optimizer, 3)
    results[rank] = whole_weights(model)


def more_ranks_than_rows(rank, world, results):
    mesh = init_device_mesh("cpu", (world,))
    grad = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    weight = nn.Parameter(distribute_tensor(torch.zeros(3, 5), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(grad, mesh, [Shard(0)])
    optimizer = Muon([{"params": [weight], "blocks": Blocks(cols=(2, 3))}], lr=1.0, weight_decay=0.0)
    optimizer.step()
    results[rank] = [weight.detach().full_tensor()]


def shardwise(rank, world, results):
    mesh = init_device_mesh("cpu", (world,))
    grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    weight = nn.Parameter(distribute_tensor(torch.zeros(6, 8), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(grad, mesh, [Shard(0)])
    Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, mode="exact", sharding="shardwise").step()
    results[rank] = [weight.detach().full_tensor()]


def one_rank_overflows(rank, world, results):
    mesh = init_device_mesh("cpu", (world,))
    grad = torch.ones(4, 4)
    grad[3, 3] = torch.inf  # lies on the last rank alone
    weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(grad, mesh, [Shard(0)])
    Muon([weight], lr=1.0, nonfinite="skip").step()
    results[rank] = [weight.detach().full_tensor()]


def worker(rank, job, world, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        job(rank, world, results)
    finally:
        dist.destroy_process_group()


def run(job, world, tmp_path):
    with multiprocessing.Manager() as manager:
        results = manager.dict()
        multiprocessing.spawn(worker, (job, world, tmp_path / "store", results), nprocs=world)
        return [results[rank] for rank in range(world)]


def test_two_fsdp_processes_train_like_one(tmp_path):
    model = small_model()
    train(model, Muon(param_groups(model), lr=0.05, mode="exact"), 3)
    for weights in run(fsdp_equals_one_process, 2, tmp_path):
        for got, expected in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(got, expected.detach(), atol=1e-5, rtol=0)


def test_four_ranks_share_a_matrix_of_three_rows(tmp_path):
    grad = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    weight = nn.Parameter(torch.zeros(3, 5))
    weight.grad = grad
    Muon([{"params": [weight], "blocks": Blocks(cols=(2, 3))}], lr=1.0, weight_decay=0.0).step()
    for (got,) in run(more_ranks_than_rows, 4, tmp_path):
        torch.testing.assert_close(got, weight.detach(), atol=1e-5, rtol=0)


def test_shardwise_orthogonalises_what_each_rank_holds(tmp_path):
    grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(2))
    expected = -torch.cat([polar_factor(part, mode="exact") for part in grad.chunk(2)])
    for (got,) in run(shardwise, 2, tmp_path):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_an_overflow_on_one_rank_is_skipped_on_all(tmp_path):
    for (got,) in run(one_rank_overflows, 2, tmp_path):
        assert torch.equal(got, torch.zeros(4, 4))


def test_an_unknown_sharding_is_refused(unchecked_types):
    with pytest.raises(ValueError, match="`sharding` must be gather or shardwise; got 'zero'"):
        Muon([nn.Parameter(torch.eye(2))], sharding="zero")
