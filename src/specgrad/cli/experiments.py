"""Figures and sweeps: ``figures``, ``figure``, ``reproduce``, ``sweep``, ``status``."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from specgrad.cli.overrides import configs_of, figure_of
from specgrad.figures._figure import claim, figure_names, load_figure, run_of, title_of
from specgrad.report.gallery import Exhibit, exhibit, gallery_page
from specgrad.runs import Run, Status, Store, status, sweep

Preset = Literal["quick", "paper"]


@dataclass(frozen=True)
class _Common:
    preset: Preset = "quick"
    out: Path = Path("specgrad-figures")
    store: Path | None = None
    workers: int | None = None
    threads: int = 1
    retry_failed: bool = False
    track: str | None = None
    module: str | None = None

    def opened(self) -> Store:
        return Store(self.store or self.out / "runs")

    def do(self, runs: Sequence[Run], store: Store, shard: str | None = None) -> list[Status]:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"`workers` must be >= 1; got {self.workers}.")
        workers = self.workers or _default_workers(runs)
        return sweep(
            runs, store, workers, shard, threads=self.threads, retry_failed=self.retry_failed, track=self.track,
        )  # fmt: skip


@dataclass(frozen=True)
class WorkOptions(_Common):
    """How runs are done.

    Attributes:
        preset: quick takes at most a minute on two cores, paper is the paper's own setting.
        out: folder for drawings and tables.
        store: folder for stored runs, which figures may share; default: runs in --out.
        workers: runs at a time; default: one per core, or one where runs use an accelerator.
        threads: threads of each run.
        retry_failed: do runs again that failed earlier.
        track: where records go as they come: jsonl:FOLDER, tensorboard:FOLDER, wandb:PROJECT or mlflow:EXPERIMENT.
        module: a figure module from elsewhere, by its importable name, instead of a name.
    """


@dataclass(frozen=True)
class SweepOptions(_Common):
    """How runs are done.

    Attributes:
        preset: quick takes at most a minute on two cores, paper is the paper's own setting.
        out: folder whose runs/ holds the stored runs, where --store is not given.
        store: folder for stored runs, which machines may share; default: runs in --out.
        workers: runs at a time; default: one per core, or one where runs use an accelerator.
        threads: threads of each run.
        retry_failed: do runs again that failed earlier.
        track: where records go as they come: jsonl:FOLDER, tensorboard:FOLDER, wandb:PROJECT or mlflow:EXPERIMENT.
        module: a figure module from elsewhere, by its importable name, instead of a name.
        shard: i/n does the i-th of n parts of the runs, with no need of a coordinator; fits a job array.
    """

    shard: str | None = None


def _default_workers(runs: Sequence[Run]) -> int:
    if any(str(run.config.get("device", "cpu")) != "cpu" for run in runs):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, len(runs)))


def list_figures(folder: Path) -> int:
    """Prints every figure with its claim and, for each preset, runs, usual time and how many are done."""
    store = Store(folder) if folder.is_dir() else None
    for name in figure_names():
        module = load_figure(name)
        print(f"{name}\n  {claim(module)}\n  {module.PAPER}: {module.FIGURE}")
        for preset in module.PRESETS:
            runs = [run_of(module, config) for config in configs_of(module, preset)]
            reached = status(runs, store) if store is not None else []
            minutes = getattr(module, "MINUTES", {}).get(preset)
            usual = f", about {_duration(60 * minutes)} on two cores" if minutes is not None else ""
            print(f"  {preset}: {len(runs)} run{'s' if len(runs) != 1 else ''}{usual}; {_count(reached, len(runs))}")
    return 0


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _count(reached: Sequence[Status], total: int) -> str:
    states = [one.outcome.state for one in reached]
    done, failed = states.count("done"), states.count("failed")
    return f"{done} done, {total - done - failed} missing" + (f", {failed} failed" if failed else "")


def do_figure(name: str, options: WorkOptions, settings: Any) -> int:
    """Runs, draws and checks one figure."""
    figure = figure_of(name, options.module)
    exhibits = _exhibits([figure], options, settings)
    print(f"Drawings and tables: {options.out}")
    return _verdict(exhibits)


def do_reproduce(names: Sequence[str], options: WorkOptions) -> int:
    """Runs, draws and checks figures, and writes the gallery."""
    outside = [figure_of("", options.module)] if options.module else []
    figures = [load_figure(name) for name in names or ([] if outside else figure_names())] + outside
    exhibits = _exhibits(figures, options, None)
    page = options.out / "index.html"
    page.write_text(gallery_page(exhibits, options.preset, options.out), encoding="utf-8")
    print(f"Gallery: {page}")
    return _verdict(exhibits)


def _exhibits(figures: Sequence[ModuleType], options: WorkOptions, settings: Any) -> list[Exhibit]:
    """Does the runs of all figures together, then draws and checks one figure after the other."""
    configs = [configs_of(figure, options.preset, settings) for figure in figures]
    store = options.opened()
    runs = [[run_of(figure, config) for config in of_figure] for figure, of_figure in zip(figures, configs, strict=True)]
    options.do([run for of_figure in runs for run in of_figure], store)
    exhibits = []
    for figure, of_figure in zip(figures, runs, strict=True):
        print(f"{title_of(figure)}: {claim(figure)}", flush=True)
        shown = exhibit(figure, status(of_figure, store), store, options.out)
        print(*shown.lines(), sep="\n", flush=True)
        exhibits.append(shown)
    return exhibits


def _verdict(exhibits: Sequence[Exhibit]) -> int:
    """130 if runs are missing (the work was stopped), 1 if a run or check failed, else 0."""
    missing = sum(one.outcome.state == "missing" for shown in exhibits for one in shown.runs)
    if missing:
        print(f"specgrad: interrupted: {missing} runs are missing; repeat the command to continue.", file=sys.stderr)
        return 130
    failed = sum(one.outcome.state == "failed" for shown in exhibits for one in shown.runs)
    if failed:
        print(f"specgrad: {failed} runs failed; try them again with --retry-failed.", file=sys.stderr)
    return int(not all(shown.passed for shown in exhibits))


def do_sweep(name: str, options: SweepOptions, settings: Any) -> int:
    """Does the runs of a figure, or one shard of them."""
    figure = figure_of(name, options.module)
    store = options.opened()
    runs = [run_of(figure, config) for config in configs_of(figure, options.preset, settings)]
    reached = options.do(runs, store, options.shard)
    print(f"{title_of(figure)}: {_count(reached, len(reached))}, in {store.path}")
    failed = [one for one in reached if one.outcome.state == "failed"]
    for one in failed:
        print(f"  {one.label}: {one.outcome.why}")
    if any(one.outcome.state == "missing" for one in reached):
        return 130
    return int(bool(failed))


def do_status(names: Sequence[str], preset: str, folder: Path, module: str | None) -> int:
    """Prints where every run of figures stands; exit status 1 if one failed."""
    if not folder.is_dir():
        raise ValueError(f"`store` must be a folder with stored runs; got {str(folder)!r}, which does not exist.")
    store = Store(folder)
    outside = [figure_of("", module)] if module else []
    failed = False
    for figure in [load_figure(name) for name in names or ([] if outside else figure_names())] + outside:
        reached = status([run_of(figure, config) for config in configs_of(figure, preset)], store)
        print(f"{title_of(figure)} ({preset}): {_count(reached, len(reached))}")
        for one in reached:
            seconds = f", {one.seconds:.1f} s" if one.seconds is not None else ""
            print(f"  {one.outcome.state:<8}{one.label}{seconds}" + (f": {one.outcome.why}" if one.outcome.why else ""))
            failed |= one.outcome.state == "failed"
    return int(failed)
