"""The figure contract: a module that owns a claim, the runs behind it, the measurement, the check and the drawing.

A figure is a module of this folder (or any importable one) with

- a docstring whose first sentence is the claim;
- ``PAPER`` and ``FIGURE``: key of the paper in ``assets/citations.bib`` and what it shows there;
- ``CITES`` (optional): keys of further works that it uses;
- ``EXPERIMENT``: name of the runs; figures that share it share stored runs;
- ``CODE``: modules whose code the stored runs depend on;
- ``Config``: a frozen dataclass with a ``seed``, its fields documented and checked;
- ``PRESETS``: ``quick`` (at most a minute on two cores) and ``paper``, each a list of configurations;
- ``MINUTES`` (optional): what each preset takes on two cores;
- ``measure(config, watch) -> records``, where ``watch`` reports progress and may ask to stop;
- ``identity(config) -> dict``: what determines the result, JSON-ready (default: every field but the seed);
- ``check(table) -> list[Check]`` and ``draw(table) -> matplotlib figure``.
"""

import dataclasses
import difflib
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from specgrad.runs import Run, Watch, code_version
from specgrad.stats import Check

__all__ = ["Check", "Watch", "claim", "figure_names", "load_figure", "load_outside_figure", "nearest", "run_of", "title_of"]

_CONTRACT = ("PAPER", "FIGURE", "EXPERIMENT", "CODE", "Config", "PRESETS", "measure", "check", "draw")


def figure_names() -> list[str]:
    """Names of the figures of this package, found by scanning the folder: ``gpt-optimizers`` for ``gpt_optimizers.py``."""
    package = importlib.import_module("specgrad.figures")
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def nearest(name: str, names: Sequence[str]) -> str:
    """`` Did you mean ...?`` with the nearest of ``names``, or nothing where none is near."""
    near = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def load_figure(name: str) -> ModuleType:
    """The module of a figure.

    Raises:
        ValueError: for an unknown name, with the nearest known one.
    """
    names = figure_names()
    if name not in names:
        raise ValueError(f"`figure` must be one of {', '.join(names)}; got {name!r}.{nearest(name, names)}")
    return importlib.import_module(f"specgrad.figures.{name.replace('-', '_')}")


def load_outside_figure(name: str) -> ModuleType:
    """A figure module from elsewhere, by its importable dotted name; the working folder is searched too.

    Raises:
        ValueError: if it cannot be imported, or lacks a part of the contract.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"`module` must be importable from here; got {name!r} ({error}).") from error
    missing = [part for part in _CONTRACT if not hasattr(module, part)]
    if missing:
        raise ValueError(f"`module` must be a figure; {name!r} lacks {', '.join(missing)}.")
    return module


def title_of(figure: ModuleType) -> str:
    """Name under which a figure is published: ``gpt-optimizers`` for a module ``gpt_optimizers``."""
    return figure.__name__.rpartition(".")[2].replace("_", "-")


def claim(figure: ModuleType) -> str:
    """The first sentence of the figure's docstring."""
    return (figure.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


def run_of(figure: ModuleType, config: Any) -> Run:
    """The run that a configuration stands for."""
    if hasattr(figure, "identity"):
        identity = figure.identity(config)
    else:
        identity = {k: v for k, v in dataclasses.asdict(config).items() if k != "seed"}
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return Run(figure.EXPERIMENT, identity, config.seed, code_version(*figure.CODE), _Measurement(figure.__name__, settings))


@dataclass(frozen=True)
class _Measurement:
    """A measurement that travels to a worker by name and settings, without what the configuration has computed."""

    module: str
    settings: dict[str, Any]

    def __call__(self, watch: Watch) -> list[dict[str, Any]]:
        figure = importlib.import_module(self.module)
        records: list[dict[str, Any]] = figure.measure(figure.Config(**self.settings), watch)
        return records
