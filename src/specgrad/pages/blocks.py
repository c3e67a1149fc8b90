"""Building blocks of a page; each returns safe HTML."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup


@dataclass(frozen=True)
class Column:
    """A table's column.

    Attributes:
        title: heading.
        digits: decimals of a number; None for text.
        classed: whether a cell's text is also its CSS class, for verdicts.
        wide: whether the text is long and should wrap late.
    """

    title: str
    digits: int | None = None
    classed: bool = False
    wide: bool = False


def text(content: str, *, note: bool = False) -> Markup:
    """A paragraph."""
    return Markup('<p class="note">{}</p>' if note else "<p>{}</p>").format(content)


def code(content: str) -> Markup:
    """Preformatted lines, such as a command."""
    return Markup("<pre>{}</pre>").format(content)


def table(columns: Sequence[Column], rows: Sequence[Sequence[str | float | int]], *, sortable: bool = False) -> Markup:
    """A table that scrolls sideways where it does not fit; numbers that are NaN show as a dash."""
    head = Markup("").join(_head(column, sortable) for column in columns)
    body = Markup("").join(
        Markup("<tr>{}</tr>").format(Markup("").join(_cell(c, v) for c, v in zip(columns, row, strict=True))) for row in rows
    )
    kind = Markup(' class="sortable"') if sortable else ""
    return Markup(
        '<div class="scroll" tabindex="0"><table{}><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    ).format(kind, head, body)


def _head(column: Column, sortable: bool) -> Markup:
    title = Markup('<button type="button">{}</button>').format(column.title) if sortable else column.title
    number = Markup(' class="number"') if column.digits is not None else ""
    return Markup('<th scope="col"{}>{}</th>').format(number, title)


def _cell(column: Column, value: str | float | int) -> Markup:
    if column.digits is None:
        kind = value if column.classed else "wide" if column.wide else "name"
        return Markup('<td class="{}" data-sort="{}">{}</td>').format(kind, value, value)
    shown = "–" if value != value else f"{value:,.{column.digits}f}"
    return Markup('<td class="number" data-sort="{}">{}</td>').format(value, shown)


def settings(pairs: Mapping[str, object]) -> Markup:
    """A list of names and values."""
    rows = (Markup("<dt>{}</dt><dd>{}</dd>").format(name, value) for name, value in pairs.items())
    return Markup("<dl>{}</dl>").format(Markup("").join(rows))


def heading(content: str) -> Markup:
    """A heading inside a section."""
    return Markup("<h3>{}</h3>").format(content)


def checks(items: Sequence[tuple[bool, str, str]]) -> Markup:
    """Outcomes: whether each passed, what was checked, and expectation and result in words."""
    rows = (
        Markup('<li><b class="{}">{}</b> {}<br><span>{}</span></li>').format(outcome.lower(), outcome, name, detail)
        for outcome, name, detail in (("PASS" if ok else "FAIL", name, detail) for ok, name, detail in items)
    )
    return Markup('<ul class="checks">{}</ul>').format(Markup("").join(rows))


def details(summary: str, lines: Sequence[str]) -> Markup:
    """A list that opens on a click."""
    items = Markup("").join(Markup("<li>{}</li>").format(line) for line in lines)
    return Markup("<details><summary>{}</summary><ul>{}</ul></details>").format(summary, items)


def side_by_side(*blocks: Markup) -> Markup:
    """Blocks next to each other where there is room."""
    return Markup('<div class="plots">{}</div>').format(Markup("").join(Markup("<div>{}</div>").format(b) for b in blocks))


def plot(svg: str, caption: str) -> Markup:
    """An SVG drawing with a caption, embedded in the page."""
    # Several drawings share one document, so the identifiers inside each are made its own.
    prefix = re.sub(r"[^a-z0-9]+", "-", caption.lower())[:64]
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg[svg.index("<svg") :])
    return Markup('<figure role="img" aria-label="{}">{}<figcaption>{}</figcaption></figure>').format(
        caption, Markup(body), caption
    )
