"""Running what is missing, and publishing what came out."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import polars as pl

from specgrad.figures._figure import Check, Watch, run_of
from specgrad.plots import save_figure, style
from specgrad.runs import Store, provenance


def collect(
    figure: ModuleType, configs: Sequence[Any], store: Store, watch_for: Callable[[Any], Watch] | None = None
) -> pl.DataFrame:
    """Table of all configurations; runs that are in the store are read, the others are done and stored one by one.

    Args:
        figure: a figure module.
        configs: its configurations.
        store: where runs lie.
        watch_for: gives each configuration that has to be run its `Watch`.

    Returns:
        The records of all runs under each other, with the scalar settings of their run as further columns.
    """
    tables = []
    for config in configs:
        run = run_of(figure, config)
        if run not in store:
            watch = watch_for(config) if watch_for else Watch()
            began = time.perf_counter()
            records = figure.measure(config, watch)
            about = provenance(getattr(config, "device", "cpu"))
            store.write(run, records, about | {"wall_seconds": time.perf_counter() - began})
        settings = {k: v for k, v in run.config.items() if isinstance(v, str | int | float)} | {"seed": run.seed}
        table = store.read(run)
        tables.append(table.with_columns(pl.lit(v).alias(k) for k, v in settings.items() if k not in table.columns))
    return pl.concat(tables, how="diagonal_relaxed")


def publish(figure: ModuleType, table: pl.DataFrame, folder: Path, name: str) -> list[Check]:
    """Writes ``name`` as pdf, svg, png, csv and a LaTeX table of its checks into ``folder``; returns the checks."""
    folder.mkdir(parents=True, exist_ok=True)
    checks: list[Check] = figure.check(table)
    with style():
        drawn = figure.draw(table)
        save_figure(drawn, folder / name)
        plt.close(drawn)
    flat = table.select(c for c, kind in table.schema.items() if not kind.is_nested())
    flat.write_csv(folder / f"{name}.csv")
    (folder / f"{name}.tex").write_text(latex_table(checks), encoding="utf-8")
    return checks


def latex_table(checks: Sequence[Check]) -> str:
    """The checks as a LaTeX ``tabular`` with booktabs rules."""
    rows = [(c.name, c.expected, c.tolerance, c.got, "pass" if c.passed else "FAIL") for c in checks]
    body = "".join(" & ".join(map(_latex, row)) + r" \\" + "\n" for row in rows)
    head = " & ".join(("Check", "Expected", "Tolerance", "Got", "")) + r" \\" + "\n"
    return "\\begin{tabular}{lllll}\n\\toprule\n" + head + "\\midrule\n" + body + "\\bottomrule\n\\end{tabular}\n"


def _latex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$"}
    special |= {c: "\\" + c for c in "&%$#_{}"} | {"±": r"$\pm$", "≥": r"$\geq$", "−": "$-$", "≤": r"$\leq$"}
    return "".join(special.get(c, c) for c in text)
