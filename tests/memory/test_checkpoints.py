"""Interrupted simulations continue from their checkpoint, to the same bits."""

import pytest
import torch

from specgrad import memory

TASK = memory.Task(num_items=500, dim=12, alpha=1.5, seed=5)
RUNS = {
    "line search": {"update": "muon", "with_loss": True},
    "minibatch with momentum": {"update": "gd", "lr": 3.0, "batch_size": 50, "momentum": 0.5, "weight_decay": 0.01},
    "optimizer": {"update": lambda w: torch.optim.Adam(w, lr=0.1), "batch_size": 50},
    "hybrid": {"update": "muon", "gradient": "hybrid", "rows": 20, "lr": "sqrt-dim"},
}


class Crash(Exception):
    pass


def crash_after(step):
    def on_step(done, loss):
        if done == step:
            raise Crash

    return on_step


def without_time(run):
    return [{key: value for key, value in record.items() if key != "seconds"} for record in run.records]


@pytest.mark.filterwarnings("ignore::specgrad.memory.MeanFieldWarning")
@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_a_run_that_crashed_continues_to_the_same_bits(tmp_path, settings):
    file = tmp_path / "run.pt"
    whole = memory.simulate(TASK, steps=5, **settings)
    with pytest.raises(Crash):
        memory.simulate(TASK, steps=5, checkpoint=file, on_step=crash_after(2), **settings)
    seen = []
    again = memory.simulate(TASK, steps=5, checkpoint=file, on_step=lambda done, _: seen.append(done), **settings)
    assert seen == [3, 4, 5]
    torch.testing.assert_close(torch.stack(again.weights), torch.stack(whole.weights), rtol=0, atol=0)
    for got, expected in zip(without_time(again), without_time(whole), strict=True):
        assert got == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
    seconds = again.column("seconds")
    assert seconds == sorted(seconds)


def test_a_finished_run_is_read_cut_or_lengthened(tmp_path):
    file = tmp_path / "run.pt"
    done = memory.simulate(TASK, "muon", 3, checkpoint=str(file))
    seen = []
    again = memory.simulate(TASK, "muon", 3, checkpoint=file, on_step=lambda step, _: seen.append(step))
    assert again.records == done.records
    assert memory.simulate(TASK, "muon", 2, checkpoint=file).records == done.records[:2]
    assert seen == []
    longer = memory.simulate(TASK, "muon", 4, checkpoint=file)
    assert torch.equal(longer.weight, memory.simulate(TASK, "muon", 4).weight)


def test_a_run_stopped_between_steps_keeps_all_of_them(tmp_path):
    file, done = tmp_path / "run.pt", []
    memory.simulate(
        TASK, "gd", 9, 1.0, checkpoint=file, on_step=lambda step, _: done.append(step), should_stop=lambda: len(done) == 4
    )
    memory.simulate(TASK, "gd", 9, 1.0, checkpoint=file, on_step=lambda step, _: done.append(step))
    assert done == list(range(1, 10))


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    file = tmp_path / "run.pt"
    memory.simulate(TASK, "muon", 2, 3.0, checkpoint=file)
    with pytest.raises(ValueError, match=r"must hold this run or not exist; .* holds one with update 'muon', now 'gd'"):
        memory.simulate(TASK, "gd", 2, 3.0, checkpoint=file)
    with pytest.raises(ValueError, match=r"its rates are \[3.0, 3.0\], now \[2.0, 2.0\]"):
        memory.simulate(TASK, "muon", 2, 2.0, checkpoint=file)
    with pytest.raises(ValueError, match=r"seed 5, now 6"):
        memory.simulate(memory.Task(500, 12, 1.5, seed=6), "muon", 2, 3.0, checkpoint=file)
    measured = memory.Task.from_counts(range(1, 51), dim=4)
    memory.simulate(measured, "muon", 1, checkpoint=tmp_path / "measured.pt")
    with pytest.raises(ValueError, match=r"arrays '\w+', now '\w+'"):
        memory.simulate(memory.Task.from_counts(range(2, 52), dim=4), "muon", 1, checkpoint=tmp_path / "measured.pt")


def test_a_damaged_checkpoint_is_set_aside(tmp_path):
    file = tmp_path / "run.pt"
    for content in (b"", b"no checkpoint", b"PK\x03\x04"):
        file.write_bytes(content)
        with pytest.warns(UserWarning, match=r"run.pt cannot be read .* kept as run.pt.damaged"):
            run = memory.simulate(TASK, "gd", 1, 1.0, checkpoint=file)
        assert len(run.records) == 1
        assert (tmp_path / "run.pt.damaged").read_bytes() == content


def test_a_checkpoint_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    for path in (tmp_path, tmp_path / "missing" / "run.pt"):
        with pytest.raises(ValueError, match=r"`checkpoint` of `memory.simulate` must be a file in an existing folder"):
            memory.simulate(TASK, "gd", 1, 1.0, checkpoint=path)
