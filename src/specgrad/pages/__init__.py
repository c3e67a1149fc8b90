"""Self-contained HTML pages: shell, sortable tables, embedded drawings; knows no lab."""

from specgrad.pages.blocks import Column, checks, code, details, heading, plot, settings, side_by_side, table, text
from specgrad.pages.page import Section, Tile, render_page

__all__ = [
    "Column",
    "Section",
    "Tile",
    "checks",
    "code",
    "details",
    "heading",
    "plot",
    "render_page",
    "settings",
    "side_by_side",
    "table",
    "text",
]
