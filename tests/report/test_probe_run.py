import json
import math
import os
import signal

import pytest
from rich.console import Console

from specgrad.report.probe_run import ProbeOptions, build_hf, live_table, run_probe

BUILD = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(64, 6)
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())
    return model, torch.utils.data.DataLoader(data, batch_size=16), nn.CrossEntropyLoss()

def hinge():
    model, loader, _ = build()
    return model, loader, lambda outputs, targets: outputs.abs().mean()

def nothing():
    return build()[0]

def empty():
    model, _, loss = build()
    return model, [], loss
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"mine_{tmp_path.name}.py").write_text(BUILD)
    return f"mine_{tmp_path.name}"


def test_a_users_callable_is_trained_probed_and_reported(folder, tmp_path):
    seen = []
    options = ProbeOptions(f"{folder}:build", steps=12, every=5, gain=True, out=tmp_path / "out")
    run = run_probe(options, lambda step, record: seen.append((step, record)))
    assert len(run.losses) == 12
    assert sorted({r["step"] for r in run.report.records}) == [0, 5, 10]
    assert {r["layer"] for r in run.report.advantages} == {"0", "2"}
    assert len(run.report.audit().rows) >= 1
    page = run.path.read_text()
    assert "What to do next" in page
    assert page.count("<svg") == 2
    assert "Predicted against realised" in page
    lines = [json.loads(line) for line in (tmp_path / "out" / "probe.jsonl").read_text().splitlines()]
    assert {line["level"] for line in lines} == {1, 2, 3}
    assert len((tmp_path / "out" / "probe.csv").read_text().splitlines()) == 7
    assert sum("loss" in record for _, record in seen) == 12
    assert sum("0/ratio" in record for _, record in seen) == 3


def test_a_loss_without_a_sampler_leaves_the_higher_levels_out(folder, tmp_path, capsys):
    run = run_probe(ProbeOptions(f"{folder}:hinge", steps=2, every=1, out=tmp_path / "out"))
    assert run.report.records
    assert run.report.advantages == []
    assert "left out" in capsys.readouterr().err


def test_transformers_models_are_built_from_their_configuration(tmp_path):
    pytest.importorskip("transformers")
    config = ("n_layer=1", "n_embd=16", "n_head=2", "vocab_size=256")
    options = ProbeOptions(hf="gpt2", random_init=True, config=config, steps=3, every=2, context=16, out=tmp_path)
    run = run_probe(options)
    assert all(math.isfinite(loss) for loss in run.losses)
    assert run_probe(options).losses == run.losses
    assert any("c_fc" in layer.layer for layer in run.report.layers)
    again = build_hf(options)[0]
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in run.report.model.parameters())


def test_the_live_table_shows_every_layer(folder, tmp_path):
    run = run_probe(ProbeOptions(f"{folder}:build", steps=1, every=1, advantage=False, out=tmp_path / "out"))
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(live_table(run.report, 0, 1.0))
    shown = console.export_text()
    assert "nr(G)" in shown and "holds on" in shown.replace("\n", " ")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({}, "either a target package.module:callable or --hf"),
        ({"target": "a:b", "hf": "gpt2"}, "either a target"),
        ({"hf": "gpt2"}, "without --random-init"),
        ({"target": "a:b", "every": 0}, "`every` must be >= 1; got 0"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_built(settings, message):
    with pytest.raises(ValueError, match=message):
        ProbeOptions(**settings)


@pytest.mark.parametrize(
    "name, message",
    [
        ("nothing", r"must return \(model, loader, loss_fn\).*returned Sequential"),
        ("absent", "can be imported"),
        ("empty", "it is empty"),
    ],
)
def test_bad_targets_are_refused_by_name(folder, tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        run_probe(ProbeOptions(f"{folder}:{name}", out=tmp_path / "out"))
    with pytest.raises(ValueError, match=r"must be package.module:callable"):
        run_probe(ProbeOptions(folder, out=tmp_path / "out"))


def test_unknown_model_types_are_refused_by_name(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="causal model type of transformers; got 'gpt17'"):
        run_probe(ProbeOptions(hf="gpt17", random_init=True, out=tmp_path))
    with pytest.raises(ValueError, match="n_layer=2; got 'n_layer'"):
        run_probe(ProbeOptions(hf="gpt2", random_init=True, config=("n_layer",), out=tmp_path))
    with pytest.raises(ValueError, match="`context` must fit the 16 positions of the gpt2 configuration; got 64"):
        run_probe(ProbeOptions(hf="gpt2", random_init=True, config=("n_positions=16", "n_layer=1"), out=tmp_path))


def test_ctrl_c_ends_the_training_and_reports_what_was_measured(folder, tmp_path):
    def interrupt(step, record):
        if step == 6:
            os.kill(os.getpid(), signal.SIGINT)

    run = run_probe(ProbeOptions(f"{folder}:build", steps=10_000, every=5, out=tmp_path / "out"), interrupt)
    assert run.interrupted
    assert len(run.losses) == 7
    assert sorted({r["step"] for r in run.report.records}) == [0, 5]
    assert run.report.advantages == []
    assert run.path.exists()
