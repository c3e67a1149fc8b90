"""Running what is missing, and publishing what came out."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import polars as pl

from specgrad.figures._figure import Check, run_of
from specgrad.plots import save_figure, style
from specgrad.runs import Run, Status, Store, sweep
from specgrad.runs.run import settings_columns


class RunsFailed(RuntimeError):
    """Some runs behind a figure failed; their tracebacks are in the store."""

    def __init__(self, failed: Sequence[Status], total: int) -> None:
        first = failed[0]
        super().__init__(f"{len(failed)} of {total} runs failed, the first being {first.label}: {first.outcome.why}")
        self.failed = failed


class RunsMissing(Exception):
    """The work was stopped before all runs behind a figure were done; what is finished is in the store."""

    def __init__(self, missing: int, total: int) -> None:
        super().__init__(f"{missing} of {total} runs are not done yet")


def collect(figure: ModuleType, configs: Sequence[Any], store: Store, executor: Any = None, **how: Any) -> pl.DataFrame:
    """Table of all configurations; runs that are in the store are read, the others are done and stored one by one.

    Args:
        figure: a figure module.
        configs: its configurations; equal ones count once.
        store: where runs lie.
        executor: who does the runs, see `specgrad.runs.sweep`.
        **how: further arguments of `specgrad.runs.sweep`.

    Returns:
        The records of all runs under each other, with the scalar settings of their run as further columns.

    Raises:
        RunsFailed: if a run failed, now or earlier.
        RunsMissing: if not all were done.
    """
    runs = list({run.key: run for run in (run_of(figure, config) for config in configs)}.values())
    reached = sweep(runs, store, executor, **how)
    failed = [one for one in reached if one.outcome.state == "failed"]
    if failed:
        raise RunsFailed(failed, len(runs))
    missing = sum(one.outcome.state == "missing" for one in reached)
    if missing:
        raise RunsMissing(missing, len(runs))
    try:
        tables = [store.read(run) for run in runs]
    except KeyError:
        # A file whose inside is damaged, which shows only now: it was set aside, and its run is done again.
        return collect(figure, configs, store, executor, **how)
    return pl.concat(
        [with_settings(table, run) for table, run in zip(tables, runs, strict=True)],
        how="diagonal_relaxed",
    )


def with_settings(table: pl.DataFrame, run: Run) -> pl.DataFrame:
    """A run's table with its seed and scalar settings as further columns."""
    columns = settings_columns(run.config, run.seed)
    return table.with_columns(pl.lit(v).alias(k) for k, v in columns.items() if k not in table.columns)


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
