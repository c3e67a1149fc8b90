"""The probe's report as a page."""

from collections.abc import Sequence

from markupsafe import Markup

from specgrad.pages import Column, Section, render_page, table, text
from specgrad.probe.report import CAVEAT, LayerSummary, ProbeReport

LAYER_COLUMNS = (
    Column("layer"),
    Column("shape"),
    Column("stable rank of inputs", 1),
    Column("nuclear rank of gradient", 1),
    Column("ratio", 2),
    Column("verdict", classed=True),
    Column("held, %", 0),
    Column("tokens", 0),
)


def layer_row(layer: LayerSummary) -> tuple[str | float | int, ...]:
    """A layer's cells under `LAYER_COLUMNS`."""
    shape = f"{layer.rows}×{layer.cols}"
    return (
        layer.layer, shape, layer.stable_rank, layer.nuclear_rank, layer.ratio, layer.verdict, 100 * layer.held,
        layer.tokens,
    )  # fmt: skip


def layer_table(layers: Sequence[LayerSummary]) -> Markup:
    """The sortable table of layers."""
    return table(LAYER_COLUMNS, [layer_row(layer) for layer in layers], sortable=True)


def probe_page(report: ProbeReport) -> str:
    """A page with the layers, the verdict lines and what was left out."""
    sections = [
        Section("Layers", [layer_table(report.layers), text(CAVEAT, note=True)]),
        Section("Verdicts", [text(str(layer)) for layer in report.layers]),
    ]
    if report.skipped:
        rows = list(report.skipped.items())
        sections.append(Section("Not probed", [table((Column("parameter"), Column("reason")), rows)]))
    return render_page("Which layers are in the spectral regime?", [report.summary()], sections)
