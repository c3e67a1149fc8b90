"""The probe's report as a page."""

import math
from collections.abc import Iterator, Sequence

from markupsafe import Markup, escape

from specgrad.pages import Column, Section, details, render_page, side_by_side, table, text
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
    Column("layer"),
    Column("shape"),
    Column("st(A)", 1),
    Column("nr(G)", 1),
    Column("nr/st", 2),
    Column("verdict", classed=True),
    Column("held, %", 0),
    Column("predicted", 2),
    Column("± %", 0),
    Column("realised", 2),
    Column("top token, %", 1),
    Column("tokens", 0),
)

_AUDIT_COLUMNS = (
    Column("step", 0),
    Column("layer"),
    Column("predicted", 2),
    Column("realised", 2),
    Column("error factor", 2),
)

_LEGEND = (
    "st(A): stable rank of the inputs; nr(G): nuclear rank of the gradient; held: how often nr/st was at least 1. "
    "Predicted and realised: decrease of the loss by the best spectral over that by the best Euclidean step on this layer "
    "alone, from sampled curvature (± standard error) and by line search. Top token: its share of the squared norm of the "
    "inputs. "
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
        (
            *layer_row(layer)[:7], layer.advantage, 100 * layer.advantage_error, layer.gain, 100 * layer.outlier_share,
            layer.tokens or math.nan,
        )
        for layer in layers
    ]  # fmt: skip
    return table(_MORE_COLUMNS, rows, sortable=True)


def notebook_html(report: ProbeReport) -> str:
    """Summary, table and advice, as a notebook shows them."""
    return str(Markup("").join([text(report.summary()), layer_table(report.layers), *map(_prose, report.next_steps())]))


def probe_page(report: ProbeReport, drawings: Sequence[Markup] = ()) -> str:
    """A page with advice, layers, predictions against line searches, and what is missing, with the reason.

    Args:
        report: the measurements.
        drawings: shown below the table of layers.
    """
    matrices = [layer for layer in report.layers if layer.kind != "gain"]
    gains = [layer for layer in report.layers if layer.kind == "gain"]
    drawn = [side_by_side(*drawings)] if drawings else []
    sections = [
        Section("What to do next", [_prose(line) for line in report.next_steps()]),
        Section("Layers", [layer_table(matrices), text(_LEGEND + CAVEAT, note=True), *drawn]),
    ]
    if gains:
        note = text("The same comparison for a sign step against a gradient step on the gains of norms.", note=True)
        sections.append(Section("Norm gains", [layer_table(gains), note]))
    audited = report.audit() if report.gains and report.advantages else None
    if audited is not None and audited.rows:
        rows = [tuple(row.values()) for row in audited.rows]
        sections.append(Section("Predicted against realised", [text(audited.verdict()), table(_AUDIT_COLUMNS, rows)]))
    missing = [row for layer in report.layers for row in _missing(layer)]
    if missing:
        titles = (Column("layer"), Column("value"), Column("reason", wide=True))
        sections.append(Section("Without a value", [table(titles, missing)]))
    if report.skipped:
        by_reason: dict[str, list[str]] = {}
        for name, reason in report.skipped.items():
            by_reason.setdefault(reason, []).append(name)
        blocks = [details(f"{len(names)} parameters: {reason}", names) for reason, names in by_reason.items()]
        sections.append(Section("Not probed", blocks))
    return render_page("Which layers are in the spectral regime?", [report.summary()], sections)


def _prose(line: str) -> Markup:
    """A paragraph with what stands between backticks as code."""
    parts = [Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in enumerate(line.split("`"))]
    return Markup("<p>{}</p>").format(Markup("").join(parts))


def _missing(layer: LayerSummary) -> Iterator[tuple[str, str, str]]:
    about = (("verdict", layer.reason), ("predicted", layer.advantage_reason), ("realised", layer.gain_reason))
    for value, reason in about:
        if reason:
            yield layer.layer, value, reason
