import dataclasses
import inspect
import re

import polars as pl
import pytest

from specgrad.figures import _gpt, gpt_condition, gpt_optimizers, polar_error, probe_adaptive, probe_advantage
from specgrad.figures._collect import collect, latex_table, publish
from specgrad.figures._figure import Check, Watch, claim, figure_names, load_figure, run_of
from specgrad.runs import Store

NAMES = figure_names()


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_keeps_the_contract(name):
    figure = load_figure(name)
    assert claim(figure).endswith(".")
    assert isinstance(figure.PAPER, str)
    assert isinstance(figure.FIGURE, str)
    assert set(figure.PRESETS) == {"quick", "paper"}
    assert all(isinstance(config, figure.Config) for configs in figure.PRESETS.values() for config in configs)
    assert figure.Config.__dataclass_params__.frozen
    documented = re.findall(r"^\s+(\w+): ", inspect.getdoc(figure.Config), flags=re.MULTILINE)
    assert {field.name for field in dataclasses.fields(figure.Config)} <= set(documented)
    assert all(callable(getattr(figure, part)) for part in ("measure", "check", "draw"))


def test_an_unknown_figure_is_answered_with_the_nearest_name():
    with pytest.raises(ValueError, match="Did you mean 'polar-error'"):
        load_figure("polar-eror")


def test_the_quick_preset_of_the_polar_error_passes_its_checks_and_publishes_every_format(tmp_path):
    store = Store(tmp_path / "runs")
    table = collect(polar_error, polar_error.PRESETS["quick"], store)
    checks = publish(polar_error, table, tmp_path, "polar-error")
    assert len(checks) == 8
    assert all(check.passed for check in checks)
    assert {p.suffix for p in tmp_path.glob("polar-error.*")} == {".pdf", ".svg", ".png", ".csv", ".tex"}
    assert pl.read_csv(tmp_path / "polar-error.csv").height == table.height


def test_stored_runs_are_read_and_not_run_again(tmp_path, monkeypatch):
    store = Store(tmp_path)
    config = polar_error.Config(rows=8, cols=8, draws=1)
    first = collect(polar_error, [config], store)
    monkeypatch.setattr(polar_error, "measure", lambda *_: pytest.fail("run again"))
    assert collect(polar_error, [config], store).equals(first)


def test_a_check_fails_when_a_kernel_is_worse_than_its_claim():
    table = pl.DataFrame(
        polar_error.measure(polar_error.Config(rows=16, cols=16, draws=1), Watch()), infer_schema_length=None
    )
    assert all(check.passed for check in polar_error.check(table))
    worse = table.with_columns(
        error=pl.when(pl.col("method") == "eigh").then(1e-3).otherwise("error"),
        gain=pl.when(pl.col("method") == "qdwh").then(1.3).otherwise("gain"),
    )
    failed = [check.name for check in polar_error.check(worse) if not check.passed]
    assert [name.split(",")[0] for name in failed] == [
        "largest error of eigh exact", "largest error of eigh strict", "largest singular value of any result",
    ]  # fmt: skip


def synthetic(losses):
    """A table as of three finished runs, with given final losses."""
    rows = []
    for update, loss in losses.items():
        for layer, ratio in (("a", 3.0), ("b", 0.4)):
            rows.append({"update": update, "step": 0, "layer": layer, "ratio": ratio})
        rows += [{"update": update, "step": s, "val_loss": loss + 1 / (s + 1), "train_loss": loss} for s in (0, 5, 10)]
        rows.append({"update": update, "step": 10, "val_loss": loss, "sequence_losses": [loss - 0.01, loss, loss + 0.01]})
    return pl.DataFrame(rows, infer_schema_length=None).with_columns(mlp=pl.lit("relu2"), seed=pl.lit(0))


def test_the_expected_order_passes_and_any_other_fails():
    good = gpt_optimizers.check(synthetic({"adamw": 1.8, "muon-out": 1.7, "muon": 1.6}))
    assert [check.passed for check in good] == [True, True]
    bad = gpt_optimizers.check(synthetic({"adamw": 1.7, "muon-out": 1.75, "muon": 1.6}))
    assert [check.passed for check in bad] == [False, True]
    assert "-0.0500" in bad[0].got


def test_the_share_of_layers_and_times_with_the_condition_is_counted():
    checks = gpt_condition.check(synthetic({"adamw": 1.8}))
    assert checks[0].got == "50.0% of 2"
    assert not checks[0].passed


@pytest.mark.parametrize("figure", [gpt_optimizers, gpt_condition])
def test_figures_of_language_models_draw_partial_tables(figure, tmp_path):
    for losses in ({"adamw": 1.8}, {"adamw": 1.8, "muon": 1.6}):
        assert publish(figure, synthetic(losses), tmp_path, "figure") is not None
        assert (tmp_path / "figure.svg").stat().st_size > 1000


def test_runs_of_language_models_share_their_key_between_figures_and_depend_on_what_matters(tmp_path):
    config = _gpt.Config(size="tiny")
    assert run_of(gpt_optimizers, config).key == run_of(gpt_condition, config).key
    text = tmp_path / "a.txt"
    text.write_bytes(b"to be or not to be " * 200)
    variants = [
        dataclasses.replace(config, **change)
        for change in ({"seed": 1}, {"steps": 5}, {"muon_lr": 0.5}, {"mlp": "swiglu"}, {"dtype": "float64"}, {"text": text})
    ]
    keys = {run_of(gpt_optimizers, c).key for c in [config, *variants]}
    assert len(keys) == 7
    # The tuned rate written out is the same run.
    explicit = dataclasses.replace(config, muon_lr=config.recipe.muon_lr, adamw_lr=config.recipe.adamw_lr)
    assert run_of(gpt_optimizers, explicit).key == run_of(gpt_optimizers, config).key


def test_latex_tables_escape_what_latex_would_read():
    got = latex_table([Check("50 % of a_b", ">= 1", "±2", "x & y", True)])
    assert r"50 \% of a\_b & $>$= 1 & $\pm$2 & x \& y & pass \\" in got


def test_watch_passes_progress_through():
    seen = []
    config = _gpt.Config(size="tiny", steps=2, batch_size=2)
    _gpt.measure(config, Watch(on_step=lambda done, loss: seen.append(done)))
    assert seen == [1, 2]


def test_the_probes_prediction_passes_where_it_ranks_and_fails_where_it_does_not(tmp_path):
    config = probe_advantage.Config("tiny", "relu2", "muon", steps=80, first=80, draws=32)
    store = Store(tmp_path / "runs")
    table = collect(probe_advantage, [config], store)
    assert table.height == 14
    correlation, factor, _ = probe_advantage.check(table)
    assert float(correlation.got.split()[0]) > 0.5
    assert float(factor.got) < 2
    turned = table.with_columns(predicted=4 / pl.col("realised"))
    assert not probe_advantage.check(turned)[0].passed
    assert not probe_advantage.check(table.with_columns(predicted=2 * pl.col("realised")))[1].passed
    publish(probe_advantage, table, tmp_path, "advantage")
    assert (tmp_path / "advantage.png").exists()


def test_the_routing_experiment_gives_spectral_steps_to_whom_it_says(tmp_path):
    store = Store(tmp_path / "runs")
    strategies = ("adamw", "worst-half", "best-half", "adaptive", "muon")
    configs = [probe_adaptive.Config(s, "tiny", "relu2", 12, 4, 4) for s in strategies]
    table = collect(probe_adaptive, configs, store)
    last = table.filter(pl.col("final"))
    assert dict(zip(last["strategy"], last["spectral"], strict=True)) | {"adaptive": 0} == {
        "adamw": 0, "worst-half": 6, "best-half": 6, "adaptive": 0, "muon": 12,
    }  # fmt: skip
    before = table.filter(pl.col("step") < 4, pl.col("strategy") == "best-half")
    assert before["spectral"].to_list() == [0] * before.height
    assert len(probe_adaptive.check(table)) == 5
    publish(probe_adaptive, table, tmp_path, "adaptive")
    assert (tmp_path / "adaptive.png").exists()
