"""The gallery: every figure with its claim, picture, checks, settings and time on one page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import polars as pl
from markupsafe import Markup

from specgrad.figures._collect import publish, with_settings
from specgrad.figures._figure import Check, claim, title_of
from specgrad.pages import Column, Section, checks, details, plot, render_page, settings, table, text
from specgrad.runs import Status, Store, provenance


@dataclass(frozen=True)
class Exhibit:
    """What came out of one figure.

    Attributes:
        figure: the figure module.
        runs: where its runs stand.
        checks: its checks; empty where it could not be drawn.
    """

    figure: ModuleType
    runs: Sequence[Status]
    checks: Sequence[Check]

    @property
    def passed(self) -> bool:
        """Whether all runs are done and all checks passed."""
        return self.drawn and all(check.passed for check in self.checks)

    @property
    def drawn(self) -> bool:
        """Whether all runs were there to be drawn."""
        return all(one.outcome.state == "done" for one in self.runs)

    @property
    def seconds(self) -> float:
        """Wall time of all runs, one after the other."""
        return sum(one.seconds or 0.0 for one in self.runs)

    def lines(self) -> list[str]:
        """The outcome in words: one line per check, or per run that is not there."""
        if self.drawn:
            return [str(check) for check in self.checks]
        return ["not drawn"] + [f"{one.label}: {one.outcome}" for one in self.runs if one.outcome.state != "done"]


def exhibit(figure: ModuleType, runs: Sequence[Status], store: Store, folder: Path) -> Exhibit:
    """Publishes a figure into ``folder`` where all of its runs are done."""
    if any(one.outcome.state != "done" for one in runs):
        return Exhibit(figure, runs, ())
    tables = [with_settings(store.read(one.run), one.run) for one in runs]
    return Exhibit(figure, runs, publish(figure, pl.concat(tables, how="diagonal_relaxed"), folder, title_of(figure)))


def gallery_page(exhibits: Sequence[Exhibit], preset: str, folder: Path) -> str:
    """The page, with the drawings in ``folder`` embedded."""
    passed = sum(check.passed for shown in exhibits for check in shown.checks)
    total = sum(len(shown.checks) for shown in exhibits)
    undrawn = [title_of(shown.figure) for shown in exhibits if not shown.drawn]
    lead = [
        f"{len(exhibits)} figures by preset {preset}: {passed} of {total} checks pass."
        + (f" Not drawn, because runs failed or are missing: {', '.join(undrawn)}." if undrawn else "")
    ]
    columns = (Column("figure"), Column("claim", wide=True), Column("checks"), Column("runs", 0), Column("run time, s", 1))
    rows = [
        (title_of(s.figure), claim(s.figure), _checks_in_words(s), len(s.runs), s.seconds) for s in exhibits
    ]  # fmt: skip
    sections = [Section("Overview", [table(columns, rows, sortable=True)])]
    sections += [Section(title_of(shown.figure), _blocks(shown, folder)) for shown in exhibits]
    machine = provenance()
    shown = {k: machine[k] for k in ("processor", "cores", "system", "git", "time")}
    versions = {k: v for k, v in machine["versions"].items() if v is not None}
    sections.append(Section("Machine", [settings(shown | versions)]))
    return render_page("Figures and their claims", lead, sections)


def _checks_in_words(shown: Exhibit) -> str:
    if not shown.drawn:
        return "not drawn"
    return f"{sum(c.passed for c in shown.checks)} of {len(shown.checks)} pass"


def _blocks(shown: Exhibit, folder: Path) -> list[Markup]:
    figure = shown.figure
    blocks = [text(claim(figure)), text(f"{figure.PAPER}: {figure.FIGURE}", note=True)]
    if shown.drawn:
        name = title_of(figure)
        blocks.append(
            plot((folder / f"{name}.svg").read_text(encoding="utf-8"), f"{name}: also as pdf, png, csv and LaTeX table")
        )
        items = [(c.passed, c.name, f"expected {c.expected}, got {c.got}; tolerance: {c.tolerance}") for c in shown.checks]
        blocks.append(checks(items))
    else:
        blocks.append(text("Not drawn: " + "; ".join(shown.lines()[1:])))
    runs = [f"{one.label}: {one.outcome}" + (f", {one.seconds:.1f} s" if one.seconds else "") for one in shown.runs]
    blocks.append(details(f"{len(shown.runs)} runs, {shown.seconds:.1f} s one after the other", runs))
    common = {k: v for k, v in shown.runs[0].run.config.items() if all(one.run.config.get(k) == v for one in shown.runs)}
    if common:
        blocks.append(settings(common))
    return blocks
