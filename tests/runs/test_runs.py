import os
import signal
import time

import numpy as np
import polars as pl
import pytest
import torch

from specgrad.runs import Run, Store, code_version, provenance, stream
from specgrad.runs.interrupt import StopRequest

RUN = Run("test", {"lr": 0.1}, 0, "code")


def test_a_key_depends_on_experiment_config_seed_and_code_and_not_on_the_order_of_settings():
    others = [Run("other", {"lr": 0.1}, 0, "code"), Run("test", {"lr": 0.2}, 0, "code"), Run("test", {"lr": 0.1}, 1, "code")]
    keys = {run.key for run in [RUN, *others, Run("test", {"lr": 0.1}, 0, "new")]}
    assert len(keys) == 5
    assert Run("t", {"a": 1, "b": 2}, 0, "c").key == Run("t", {"b": 2, "a": 1}, 0, "c").key


def test_a_stored_run_is_one_parquet_file_with_configuration_and_provenance_inside(tmp_path):
    store = Store(tmp_path / "deep" / "store")
    assert RUN not in store
    store.checkpoint(RUN).write_bytes(b"state")
    store.write(RUN, [{"step": 0, "loss": 1.0}, {"step": 0, "layer": "a"}], {"host": "here"})
    assert RUN in store
    assert list(store.path.iterdir()) == [store.file(RUN)]
    assert store.read(RUN).to_dicts() == [{"step": 0, "loss": 1.0, "layer": None}, {"step": 0, "loss": None, "layer": "a"}]
    about = store.about(RUN)
    assert about == {"experiment": "test", "config": {"lr": 0.1}, "seed": 0, "code": "code", "provenance": {"host": "here"}}
    assert pl.read_parquet(store.file(RUN)).height == 2


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    store = Store(tmp_path)
    monkeypatch.setattr(pl.DataFrame, "write_parquet", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        store.write(RUN, [{"x": 1}], {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"garbage", b"PAR1"])
def test_a_damaged_file_is_named_kept_and_out_of_the_way(tmp_path, content):
    store = Store(tmp_path)
    store.file(RUN).write_bytes(content)
    with pytest.warns(UserWarning, match=f"{RUN.key}.parquet cannot be read"):
        assert RUN not in store
    assert (tmp_path / f"{RUN.key}.parquet.damaged").read_bytes() == content
    store.write(RUN, [{"x": 1}], {})
    assert RUN in store


def test_reading_a_missing_run_and_a_store_in_an_impossible_place_are_refused(tmp_path):
    with pytest.raises(KeyError, match="not in the store"):
        Store(tmp_path).read(RUN)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="`path` of `Store` must be a writable folder"):
        Store(tmp_path / "file" / "store")


def test_streams_are_reproducible_and_independent_of_each_other():
    def draw(*names):
        return torch.rand(4, generator=stream(*names))

    assert torch.equal(draw(0, "weights"), draw(0, "weights"))
    draws = [draw(0, "weights"), draw(1, "weights"), draw(0, "batches"), draw(0, "batches", 1), draw(0, "batches", 11)]
    assert len({tuple(d.tolist()) for d in draws}) == len(draws)


def test_the_code_version_ignores_docstrings_and_comments_but_not_code(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    versions = []
    for number, source in enumerate(['"""Doc."""\nx = 1\n', "# comment\nx = 1\n", "x = 2\n"]):
        (tmp_path / f"module_{number}.py").write_text(source)
        (tmp_path / "versioned.py").write_text(source)
        code_version.cache_clear()
        versions.append(code_version("versioned"))
    assert versions[0] == versions[1] != versions[2]
    with pytest.raises(ValueError, match="importable; got 'no_such_module'"):
        code_version("no_such_module")


def test_provenance_names_versions_machine_and_threads():
    got = provenance()
    assert got["versions"]["torch"] == torch.__version__
    assert got["threads"] == torch.get_num_threads()
    assert got["processor"]


def test_the_first_interrupt_asks_to_stop_and_the_second_stops_at_once():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_seed_from_numpy_names_the_same_stream_and_a_fraction_none():
    draws = [torch.rand(3, generator=stream(seed, "data", step)) for seed, step in ((3, 1), (np.int64(3), np.int32(1)))]
    assert draws[0].equal(draws[1])
    with pytest.raises(TypeError):
        stream(0.5)
