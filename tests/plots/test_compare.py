import matplotlib as mpl
import numpy as np
import polars as pl
import pytest

from specgrad.plots import compare

mpl.use("agg")
T = np.linspace(0, 2, 9)
THEORY = {"t": T, "loss": np.exp(-T), "overlap": 1 - np.exp(-T)}


def markers(figure, panel=0):
    container = figure.axes[panel].containers[0]
    bars = container.lines[2]
    halves = [(s[1, 1] - s[0, 1]) / 2 for s in bars[0].get_segments()] if bars else None
    return container.lines[0].get_ydata(), halves


def test_means_and_standard_errors_over_seeds_are_drawn():
    losses = np.stack([np.exp(-T), np.exp(-T) + 0.2, np.exp(-T) + 0.4])
    figure = compare({"t": T, "loss": losses, "overlap": losses}, THEORY, ["loss", "overlap"])
    means, halves = markers(figure)
    assert means == pytest.approx(np.exp(-T) + 0.2)
    assert halves == pytest.approx([0.2 / np.sqrt(3)] * len(T))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["loss", "overlap"]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["theory", "simulation"]


def test_mappings_tables_and_records_draw_the_same():
    records = [{"t": float(t), "seed": s, "loss": float(s + t), "name": "x"} for s in range(2) for t in T]
    drawn = [markers(compare(table, None, ["loss"])) for table in (records, pl.DataFrame(records))]
    stacked = compare({"t": T, "loss": np.stack([T, T + 1])}, None, ["loss"])
    for means, halves in drawn:
        assert means == pytest.approx(markers(stacked)[0])
        assert halves == pytest.approx(markers(stacked)[1])


def test_one_seed_has_no_error_bars_and_many_points_are_thinned():
    t = np.linspace(0, 1, 1000)
    means, halves = markers(compare({"t": t, "loss": t}, None, ["loss"]))
    assert len(means) == 25
    assert means[[0, -1]] == pytest.approx([0, 1])
    assert halves is None


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match="simulation lacks 'loss', it has \\['t'\\]"):
        compare({"t": T}, THEORY, ["loss"])
    with pytest.raises(ValueError, match="theory lacks 'q'"):
        compare({"t": T, "q": T}, THEORY, ["q"])
