import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import polars as pl
import pytest

from specgrad.runs import Store, Watch, status, sweep
from tests.runs import experiment
from tests.runs.experiment import run

ROOT = Path(__file__).parents[2]


def states(reached):
    return [one.outcome.state for one in reached]


def tables(store, runs):
    return [store.read(one).rows() for one in runs]


def test_results_are_bit_for_bit_the_same_for_any_number_of_workers_and_any_order(tmp_path):
    runs = [run(seed, size=size) for size in (96, 320) for seed in range(3)]
    expected = None
    for executor in (None, 1, 2, 4):
        store = Store(tmp_path / str(executor))
        ordered = runs if executor != 2 else runs[::-1]
        assert states(sweep(ordered, store, executor, show_progress=False)) == ["done"] * 6
        got = tables(store, runs)
        assert expected is None or got == expected
        expected = got


def test_threads_are_limited_in_workers_and_here_and_given_back(tmp_path):
    import torch

    before = torch.get_num_threads()
    for executor, threads in ((None, 1), (1, 2)):
        sweep([run(threads)], Store(tmp_path), executor, threads=threads, show_progress=False)
        assert Store(tmp_path).about(run(threads))["provenance"]["threads"] == threads
    assert torch.get_num_threads() == before


def test_what_is_there_is_skipped_and_equal_runs_are_done_once(tmp_path, capsys):
    store = Store(tmp_path)
    assert len(sweep([run(0), run(0)], store)) == 1
    written = store.file(run(0)).stat().st_mtime_ns
    assert states(sweep([run(0), run(1)], store)) == ["done", "done"]
    assert store.file(run(0)).stat().st_mtime_ns == written
    assert "toy seed=0: finished earlier" in capsys.readouterr().err


@pytest.mark.parametrize("executor", [None, 2])
def test_a_failing_run_is_recorded_with_its_traceback_and_stops_no_other(tmp_path, executor):
    store = Store(tmp_path / "store")
    flag = tmp_path / "flag"
    runs = [run(0), run(1, experiment.fail, unless=str(flag)), run(2)]
    reached = sweep(runs, store, executor, show_progress=False)
    assert states(reached) == ["done", "failed", "done"]
    assert reached[1].outcome.why == "ArithmeticError: seed 1 does not work"
    assert "in fail\n    raise ArithmeticError" in store.failure(runs[1])
    flag.touch()
    assert states(sweep(runs, store, executor, show_progress=False)) == ["done", "failed", "done"]
    assert states(sweep(runs, store, executor, retry_failed=True, show_progress=False)) == ["done"] * 3
    assert store.failure(runs[1]) is None


def test_a_worker_that_is_killed_fails_its_run_alone(tmp_path):
    runs = [run(0), run(1, experiment.die, steps=1), run(2), run(3)]
    reached = sweep(runs, Store(tmp_path), 2, show_progress=False)
    assert states(reached) == ["done", "failed", "done", "done"]
    assert reached[1].outcome.why == "the worker process died with SIGKILL (out of memory?)"


def test_a_script_without_a_guard_is_told_so_and_no_run_is_blamed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from specgrad.runs import Store, sweep\nfrom tests.runs.experiment import run\n"
        f"sweep([run(0), run(1)], Store({str(tmp_path / 'store')!r}), 2)\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/src"}
    )
    assert done.returncode == 1
    assert "RuntimeError: a worker process ended with exit status 1 before it could begin" in done.stderr
    assert list((tmp_path / "store").iterdir()) == []


def test_shards_are_disjoint_and_together_all(tmp_path):
    runs = [run(seed, steps=1) for seed in range(7)]
    shards = [sweep(runs, Store(tmp_path), shard=f"{i}/3", show_progress=False) for i in (1, 2, 3)]
    seeds = [one.run.seed for shard in shards for one in shard]
    assert sorted(seeds) == list(range(7))
    assert states(status(runs, Store(tmp_path))) == ["done"] * 7


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"shard": "0/4"}, "`shard` must be i/n with 1 <= i <= n, such as 7/64; got '0/4'"),
        ({"shard": "5/4"}, "got '5/4'"),
        ({"shard": "half"}, "got 'half'"),
        ({"executor": 0}, "`executor` must be None, a number of workers >= 1, or have `submit`; got 0"),
        ({"threads": 0}, "`threads` must be >= 1; got 0"),
        ({"track": "paper:x"}, "`track` must be jsonl:FOLDER"),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_run(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        sweep([run(0)], Store(tmp_path), **settings)
    assert states(status([run(0)], Store(tmp_path))) == ["missing"]


def test_status_tells_a_checkpoint_from_nothing(tmp_path):
    store = Store(tmp_path)
    store.checkpoint(run(1)).touch()
    assert [one.outcome.why for one in status([run(0), run(1)], store)] == ["", "has a checkpoint"]


def start(store, workers, pause):
    words = [sys.executable, "-m", "tests.runs.experiment", store, workers, pause]
    return subprocess.Popen(list(map(str, words)), cwd=ROOT, stderr=subprocess.PIPE, text=True)


def wait_for(what, seconds=60):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("workers", [0, 2])
def test_kill_9_in_the_middle_of_a_sweep_and_a_resume_give_identical_files(tmp_path, workers):
    runs = [run(seed, pause=0.1) for seed in range(6)]
    whole, killed = Store(tmp_path / "whole"), Store(tmp_path / "killed")
    sweep(runs, whole, 2, show_progress=False)
    process = start(killed.path, workers, 0.1)
    wait_for(lambda: len(list(killed.path.glob("*.parquet"))) >= 2)
    process.kill()
    process.communicate()
    time.sleep(1)  # orphaned workers end with their parent's pipe
    found = list(killed.path.glob("*.parquet"))
    assert 2 <= len(found) < 6
    for file in found:
        pl.read_parquet(file)
    assert [f for f in killed.path.iterdir() if f.suffix not in (".parquet", ".pt")] == []
    sweep(runs, killed, 2, show_progress=False)
    assert {f.name for f in killed.path.glob("*.parquet")} == {f.name for f in whole.path.iterdir()}
    assert tables(killed, runs) == tables(whole, runs)


@pytest.mark.parametrize("workers, number", [(0, signal.SIGINT), (2, signal.SIGINT), (2, signal.SIGTERM)])
def test_a_stopped_sweep_keeps_states_and_leaves_no_process(tmp_path, workers, number):
    store = Store(tmp_path)
    process = start(store.path, workers, 0.5)
    wait_for(lambda: list(store.path.glob("*.parquet")))
    # The worker that has finished a run is by now in the first or second of the next one's three pauses of half a second.
    time.sleep(0.7)
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 0, error
    reached = status([run(seed, pause=0.5) for seed in range(6)], store)
    assert 1 <= states(reached).count("done") < 6
    assert any(one.outcome.why == "has a checkpoint" for one in reached)
    assert "interrupted at step" in error


def test_two_sweeps_over_one_store_at_a_time_do_not_hurt_each_other(tmp_path):
    store = Store(tmp_path)
    processes = [start(store.path, 0, 0) for _ in range(3)]
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    runs = [run(seed, pause=0.0) for seed in range(6)]
    assert states(status(runs, store)) == ["done"] * 6
    assert {f.name for f in store.path.iterdir()} == {store.file(one).name for one in runs}
    assert tables(store, runs) == [measured(one) for one in runs]


def measured(one):
    return [tuple(record.values()) for record in one.work(Watch())]


def test_any_executor_of_concurrent_futures_will_do(tmp_path):
    with ThreadPoolExecutor(1) as executor:
        reached = sweep([run(0), run(1)], Store(tmp_path), executor, show_progress=False)
    assert states(reached) == ["done", "done"]


def test_dask_workers_give_the_same_results(tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    runs = [run(seed) for seed in range(3)] + [run(9, experiment.fail, unless=str(tmp_path / "flag"))]
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    sweep(runs, here, show_progress=False)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, local_directory=str(tmp_path / "dask")
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        assert states(sweep(runs, there, client, show_progress=False)) == ["done"] * 3 + ["failed"]
        (tmp_path / "flag").touch()
        assert states(sweep(runs, there, client, retry_failed=True, show_progress=False)) == ["done"] * 4
    assert tables(here, runs[:3]) == tables(there, runs[:3])


def test_submitit_jobs_give_the_same_results(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))
    runs = [run(seed) for seed in range(2)] + [run(9, experiment.die, steps=1)]
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    sweep(runs[:2], here, show_progress=False)
    executor = submitit.AutoExecutor(folder=tmp_path / "jobs", cluster="local")
    executor.update_parameters(timeout_min=2)
    assert states(sweep(runs, there, executor, show_progress=False)) == ["done", "done", "failed"]
    assert tables(here, runs[:2]) == tables(there, runs[:2])
