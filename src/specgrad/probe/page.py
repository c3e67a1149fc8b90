"""The probe's report as a page."""

from collections.abc import Sequence

from markupsafe import Markup

from specgrad.pages import Column, Section, render_page, table, text
from specgrad.probe.report import CAVEAT, ProbeReport
from specgrad.probe.summary import LayerSummary

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

_MORE_COLUMNS = (
    *LAYER_COLUMNS[:6],
    Column("held, %", 0),
    Column("predicted advantage", 2),
    Column("realised", 2),
    Column("noise to signal", 1),
    Column("largest token, %", 1),
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
    rows = [
        (*layer_row(layer)[:7], layer.advantage, layer.gain, layer.noise_to_signal, 100 * layer.outlier_share, layer.tokens)
        for layer in layers
    ]
    return table(_MORE_COLUMNS, rows, sortable=True)


def notebook_html(report: ProbeReport) -> str:
    """Summary, table and advice, as a notebook shows them."""
    return str(Markup("").join([text(report.summary()), layer_table(report.layers), *map(text, report.next_steps())]))


def probe_page(report: ProbeReport) -> str:
    """A page with the layers, the verdict lines, predictions against line searches, and what was left out."""
    sections = [
        Section("What to do next", [text(line) for line in report.next_steps()]),
        Section("Layers", [layer_table(report.layers), text(CAVEAT, note=True)]),
        Section("Verdicts", [text(str(layer)) for layer in report.layers]),
    ]
    audited = report.audit() if report.gains and report.advantages else None
    if audited is not None and audited.rows:
        columns = (
            Column("step", 0),
            Column("layer"),
            Column("predicted", 2),
            Column("realised", 2),
            Column("error factor", 2),
        )
        rows = [tuple(row.values()) for row in audited.rows]
        sections.append(Section("Predicted against realised", [table(columns, rows), text(audited.verdict())]))
    if report.skipped:
        sections.append(
            Section("Not probed", [table((Column("parameter"), Column("reason")), list(report.skipped.items()))])
        )
    return render_page("Which layers are in the spectral regime?", [report.summary()], sections)
