"""Items divided over two processes against one: the same gradients, masks and runs."""

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from specgrad import memory

SETTINGS = {"num_items": 3001, "dim": 16, "alpha": 1.5, "seed": 9}


def results_of(task):
    """Everything that processes have to agree on."""
    weight = 8 * memory.one_step(task, "muon")
    q = task.sample(400)
    run = memory.simulate(task, "muon", 2, gradient="hybrid", rows=40, with_loss=True)
    return {
        "start": memory.gradient(task),
        "gradient": memory.gradient(task, weight),
        "batch": memory.gradient(task, weight, q),
        "hessian": memory.hessian_product(task, weight, weight),
        "newton": memory.one_step(task, "newton"),
        "whitened": memory.one_step(task, "whitened_muon"),
        "mean field": memory.estimate_gradient(task, weight, q, "mean-field").gradient,
        "recovered": memory.recovered(task, weight).double(),
        "columns": memory.estimate_gradient(task, weight, q, "hybrid", rows=40, columns=20).gradient,
        "margins": memory.margins(task, weight, torch.arange(0, 3001, 100)),
        "run": run.weight,
        "loss": torch.tensor(run.column("loss"), dtype=torch.float64),
    }


def worker(rank, world, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        task = memory.Task(**SETTINGS, split=True)
        held = results_of(task)
        streamed = results_of(memory.Task(**SETTINGS, split=True, storage="stream"))
        whole = memory.Task(**SETTINGS)
        arrays = memory.Task.from_arrays(whole.unembeddings, whole.embeddings, whole.frequencies, split=True)
        shared = memory.Task(**SETTINGS, split=True, answers=torch.arange(3001) % 50)
        asked = []
        stopped = memory.simulate(
            task, "gd", 4, 1.0, checkpoint=store.parent / "run.pt", on_step=lambda done, _: asked.append(done),
            should_stop=lambda: rank == 1 and len(asked) == 2,
        )  # fmt: skip
        again = memory.simulate(task, "gd", 4, 1.0, checkpoint=store.parent / "run.pt")
        held |= {"shared": results_of(shared), "steps": (len(stopped.records), len(again.records), again.weight)}
        results[rank] = (len(task.embeddings), held, streamed, memory.gradient(arrays, held["gradient"]))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::specgrad.memory.MeanFieldWarning")
def test_two_processes_get_what_one_gets(tmp_path):
    task = memory.Task(**SETTINGS)
    expected = results_of(task)
    assert expected["recovered"].sum() > 3
    with multiprocessing.Manager() as manager:
        results = manager.dict()
        multiprocessing.spawn(worker, (2, tmp_path / "store", results), nprocs=2)
        found = [results[rank] for rank in range(2)]
    assert [rows for rows, *_ in found] == [1500, 1501]
    shared = results_of(memory.Task(**SETTINGS, answers=torch.arange(3001) % 50))
    assert shared["recovered"].sum() > 3
    for _, held, streamed, from_arrays in found:
        steps, all_steps, weight = held.pop("steps")
        assert (steps, all_steps) == (2, 4)
        torch.testing.assert_close(weight, memory.simulate(task, "gd", 4, 1.0).weight)
        for name, value in held.pop("shared").items():
            torch.testing.assert_close(value, shared[name], rtol=1e-9, atol=1e-11)
        for got in (held, streamed):
            for name, value in expected.items():
                torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(from_arrays, memory.gradient(task, held["gradient"]), rtol=0, atol=1e-12)
