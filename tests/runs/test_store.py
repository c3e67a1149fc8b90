import multiprocessing
import os
import warnings

import polars as pl
import pytest

from specgrad.figures import polar_error
from specgrad.figures._figure import run_of
from specgrad.runs import Run, Store
from specgrad.runs.files import atomic


def run(seed=0, experiment="toy", code="1", **config):
    return Run(experiment, config, seed, code)


def test_runs_of_an_experiment_are_one_lazy_table_with_their_settings(tmp_path):
    store = Store(tmp_path)
    store.write(run(0, lr=0.1, nested=[1]), [{"step": 0, "loss": 1.0}], {})
    store.write(run(1, lr=0.2), [{"step": 0, "loss": 2.0, "extra": None}, {"step": 1, "loss": 1.5, "extra": "x"}], {})
    store.write(run(0, "other"), [{"step": 0}], {})
    table = store.table("toy")
    assert isinstance(table, pl.LazyFrame)
    got = table.sort("seed", "step").collect()
    assert got["loss"].to_list() == [1.0, 2.0, 1.5]
    assert got["lr"].to_list() == [0.1, 0.2, 0.2]
    assert got["seed"].to_list() == [0, 1, 1]
    assert got["extra"].to_list() == [None, None, "x"]
    assert set(got["key"]) == {run(0, lr=0.1, nested=[1]).key, run(1, lr=0.2).key}


def test_a_figures_table_holds_runs_of_the_present_code_alone(tmp_path):
    store = Store(tmp_path)
    present = run_of(polar_error, polar_error.Config())
    store.write(present, [{"x": 1}], {})
    store.write(Run(present.experiment, present.config, present.seed, "old"), [{"x": 2}], {})
    assert store.table(polar_error).collect()["x"].to_list() == [1]
    assert sorted(store.table(polar_error.EXPERIMENT).collect()["x"]) == [1, 2]
    with pytest.raises(KeyError, match="no finished run of 'toy'"):
        store.table("toy")


@pytest.mark.parametrize("damage", ["truncated", "foreign", "text", "renamed"])
def test_damaged_and_foreign_files_are_named_in_a_warning_and_left_out(tmp_path, damage):
    store = Store(tmp_path)
    store.write(run(0), [{"x": 1}], {})
    bad = store.path / f"{run(1).key}.parquet"
    content = store.file(run(0)).read_bytes()
    if damage == "truncated":
        bad.write_bytes(content[: len(content) // 2])
    elif damage == "foreign":
        pl.DataFrame({"x": [5]}).write_parquet(bad)
    elif damage == "text":
        bad.write_text("not a table")
    else:
        bad = store.path / "copy of a run.parquet"
        bad.write_bytes(content)
    with pytest.warns(UserWarning, match=bad.name):
        assert store.table("toy").collect()["x"].to_list() == [1]
    assert bad.exists()


def test_a_foreign_file_under_a_runs_name_is_kept_and_the_run_done_again(tmp_path):
    store = Store(tmp_path)
    pl.DataFrame({"x": [5]}).write_parquet(store.file(run()))
    with pytest.warns(UserWarning, match="not written by specgrad"):
        assert run() not in store
    assert pl.read_parquet(store.file(run()).with_suffix(".parquet.damaged"))["x"].to_list() == [5]


def test_a_file_that_is_damaged_inside_is_set_aside_when_it_is_read(tmp_path):
    store = Store(tmp_path)
    store.write(run(), [{"x": float(i)} for i in range(1000)], {})
    content = bytearray(store.file(run()).read_bytes())
    content[4:600] = os.urandom(596)
    store.file(run()).write_bytes(content)
    with pytest.warns(UserWarning, match="cannot be read"), pytest.raises(KeyError):
        store.read(run())
    assert run() not in store


def test_failures_are_kept_until_success_and_a_damaged_record_is_named(tmp_path):
    store = Store(tmp_path)
    assert store.failure(run()) is None
    store.write_failure(run(), "Traceback\nValueError: no", {})
    assert store.failure(run()) == "Traceback\nValueError: no"
    next(store.path.glob("*.failed.json")).write_text("{")
    with pytest.warns(UserWarning, match="cannot be read"):
        assert store.failure(run()) is None
    store.write_failure(run(), "again", {})
    store.write(run(), [{"x": 1}], {})
    assert store.failure(run()) is None


def write_many(path, value):
    store = Store(path)
    for _ in range(60):
        store.write(run(), [{"x": value}] * 500, {})


def test_writers_of_one_run_never_show_a_reader_half_a_file(tmp_path):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(tmp_path, value)) for value in (1, 2)]
    store, seen = Store(tmp_path), 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for writer in writers:
            writer.start()
        while any(writer.is_alive() for writer in writers):
            if run() in store:
                table = store.read(run())
                assert table.height == 500
                assert table["x"].n_unique() == 1
                seen += 1
        for writer in writers:
            writer.join()
            assert writer.exitcode == 0
    assert seen > 10
    assert list(tmp_path.iterdir()) == [store.file(run())]


def test_a_failed_atomic_write_leaves_the_old_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(OSError, match="full"), atomic(file) as temporary:
        temporary.write_text("half")
        raise OSError("full")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_temporary_files_of_killed_processes_are_removed_after_a_day(tmp_path):
    old, new = tmp_path / ".a.tmp", tmp_path / ".b.tmp"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    Store(tmp_path)
    assert not old.exists()
    assert new.exists()


def test_a_run_that_cannot_be_stored_is_refused_at_once():
    with pytest.raises(ValueError, match="`config` of `Run` must be JSON-ready"):
        run(x={1, 2})
    with pytest.raises(ValueError, match="`experiment` of `Run` must be able to begin a file name; got 'a/b'"):
        run(experiment="a/b")
