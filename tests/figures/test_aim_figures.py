import dataclasses

import polars as pl
import pytest

from specgrad.figures import (
    aim_gap,
    aim_phase_diagram,
    aim_tied_direct,
    aim_truncation_error,
    aim_truncation_linear,
    aim_truncation_softmax,
    aim_weak_recovery,
)
from specgrad.figures._collect import collect, publish
from specgrad.figures._figure import Watch
from specgrad.runs import Interrupted, Store

# Small versions of the quick presets, whose checks must still pass.
SMALL = {
    aim_gap: [aim_gap.Config("even", (20, 40, 80), 40_000, draws=2), aim_gap.Config("skewed", (50, 100, 200), 16_000)],
    aim_phase_diagram: [aim_phase_diagram.Config("h1", points=3)],
    aim_truncation_error: [aim_truncation_error.Config(orders=(4, 8), closures=(2, 3), points=301)],
    aim_truncation_linear: [aim_truncation_linear.Config("h1", dim=50, lr=0.01, t_max=0.1, draws=2, orders=(4, 8))],
    aim_truncation_softmax: [aim_truncation_softmax.Config(dim=40, lr=0.1, t_max=1.0, draws=2, orders=(4, 8))],
    aim_weak_recovery: [aim_weak_recovery.Config("h1", dim, draws=4) for dim in (16, 32)],
    aim_tied_direct: [aim_tied_direct.Config(attention, "h1", dim=32, lr=0.01, draws=1) for attention in ("tied", "direct")],
}


@pytest.mark.parametrize("figure", SMALL, ids=lambda f: f.__name__.split(".")[-1])
def test_small_runs_pass_their_checks_and_are_drawn(figure, tmp_path):
    table = collect(figure, SMALL[figure], Store(tmp_path / "runs"))
    checks = publish(figure, table, tmp_path, "figure")
    assert checks
    assert [str(check) for check in checks if not check.passed] == []
    assert (tmp_path / "figure.svg").stat().st_size > 1000


def test_checks_fail_where_the_claim_does():
    config = aim_tied_direct.Config("direct", "h3")
    rows = [{"source": s, "seed": 0, "t": t, "overlap": t} for s in ("sgd", "theory") for t in (0.0, 0.9)]
    table = pl.DataFrame(rows).with_columns(attention=pl.lit(config.attention), activation=pl.lit(config.activation))
    assert [check.passed for check in aim_tied_direct.check(table)] == [False, False]
    gap = pl.DataFrame(
        {"loss": ["even"] * 3, "dim": [50, 100, 200], "gap": [1.0, 0.7, 0.5], "error": [0.001] * 3, "third": [0.0] * 3,
         "fourth": [0.02, 0.01, 0.005]}
    )  # fmt: skip
    assert [check.passed for check in aim_gap.check(gap)] == [False, True]


def test_a_simulation_that_is_asked_to_stop_leaves_no_half_a_run():
    config = dataclasses.replace(SMALL[aim_truncation_linear][0], dim=16)
    with pytest.raises(Interrupted):
        aim_truncation_linear.measure(config, Watch(should_stop=lambda: True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: aim_gap.Config("odd"), "`loss` must be one of"),
        (lambda: aim_phase_diagram.Config(level=1.0), "`level` must lie"),
        (lambda: aim_truncation_linear.Config(orders=(8, 4)), "`orders` must list"),
        (lambda: aim_weak_recovery.Config(dim=0), "`dim` must be >= 1"),
        (lambda: aim_tied_direct.Config(activation="tanh"), "`activation` must be one of"),
        (lambda: aim_truncation_error.Config(points=1), "`points` must be >= 3"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
