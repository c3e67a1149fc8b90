import json
import sys

import pytest

from specgrad.runs import Store, sweep, tracker
from specgrad.runs.tracking import scalars
from tests.runs.experiment import run

RECORDS = [{"step": 0, "loss": 2.0}, {"step": 0, "layer": "mlp.out", "ratio": 3.5, "verdict": "holds"}]


def test_numbers_of_a_layer_are_named_by_the_layer():
    assert scalars(RECORDS[1]) == {"mlp.out/ratio": 3.5}


def test_json_lines_hold_whole_records_and_are_continued(tmp_path):
    for record in RECORDS:
        with tracker(f"jsonl:{tmp_path}", "run") as on_record:
            on_record(record["step"], record)
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == RECORDS


@pytest.mark.parametrize("executor", [None, 1])
def test_a_sweep_tracks_records_as_they_come(tmp_path, executor):
    sweep([run(0)], Store(tmp_path / "store"), executor, track=f"jsonl:{tmp_path}", show_progress=False)
    lines = (tmp_path / f"{run(0).key}.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == Store(tmp_path / "store").read(run(0)).to_dicts()


def test_tensorboard_files_hold_the_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tracker(f"tensorboard:{tmp_path}", "run", {"lr": 0.1}) as on_record:
        for record in RECORDS:
            on_record(record["step"], record)
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("mlp.out/ratio")] == [(0, 3.5)]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 2.0)]


def test_wandb_runs_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with tracker("wandb:project", "run", {"lr": 0.1}) as on_record:
        for record in RECORDS:
            on_record(record["step"], record)
    assert list(tmp_path.rglob("*.wandb"))


def test_mlflow_keeps_the_numbers(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    with tracker("mlflow:experiment", "run", {"lr": 0.1}) as on_record:
        for record in RECORDS:
            on_record(record["step"], record)
    [found] = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("experiment").experiment_id])
    assert found.data.metrics == {"loss": 2.0, "mlp.out/ratio": 3.5}
    assert found.data.params == {"lr": "0.1"}
    assert found.info.status == "FINISHED"


@pytest.mark.parametrize("spec", ["jsonl", "jsonl:", "paper:here", ""])
def test_unknown_trackers_are_refused(spec):
    with pytest.raises(ValueError, match="`track` must be jsonl:FOLDER, tensorboard:FOLDER, wandb:PROJECT or mlflow"):
        tracker(spec, "run")


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"`track` = 'wandb:x' needs wandb .*Run: pip install wandb"):
        tracker("wandb:x", "run")
