"""`render_page`: a self-contained HTML document that works offline and prints."""

from collections.abc import Sequence
from dataclasses import dataclass

import jinja2
from markupsafe import Markup


@dataclass(frozen=True)
class Section:
    """A titled part of a page."""

    title: str
    blocks: Sequence[Markup]


@dataclass(frozen=True)
class Tile:
    """A number to be seen first."""

    label: str
    value: str
    detail: str
    colour: str


def render_page(title: str, lead: Sequence[str], sections: Sequence[Section], tiles: Sequence[Tile] = ()) -> str:
    """The page as one string of HTML without any reference to other files or hosts.

    Args:
        title: heading and window title.
        lead: opening paragraphs: the answer.
        sections: the rest, in order.
        tiles: up to four numbers shown large below the lead.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("specgrad.pages"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("page.html").render(title=title, lead=lead, sections=sections, tiles=tiles)
