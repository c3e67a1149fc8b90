"""The figure contract: a module that owns a claim, the runs behind it, the measurement, the check and the drawing.

A figure is a module of this folder (or any importable one) with

- a docstring whose first sentence is the claim;
- ``PAPER`` and ``FIGURE``: key of the paper in ``CITATIONS`` and what it shows there;
- ``EXPERIMENT``: name of the runs; figures that share it share stored runs;
- ``CODE``: modules whose code the stored runs depend on;
- ``Config``: a frozen dataclass with a ``seed``, its fields documented and checked;
- ``PRESETS``: ``quick`` (at most a minute on two cores) and ``paper``, each a list of configurations;
- ``measure(config, watch) -> records``, where ``watch`` reports progress and may ask to stop;
- ``identity(config) -> dict``: what determines the result, JSON-ready (default: every field but the seed);
- ``check(table) -> list[Check]`` and ``draw(table) -> matplotlib figure``.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from specgrad.runs import Run, code_version


@dataclass(frozen=True)
class Check:
    """One numeric test of a figure's claim.

    Attributes:
        name: what is compared.
        expected: the expectation, in words and numbers.
        tolerance: how far off still passes, in words and numbers.
        got: what came out.
        passed: whether the expectation is met.
    """

    name: str
    expected: str
    tolerance: str
    got: str
    passed: bool

    def __str__(self) -> str:
        outcome = "PASS" if self.passed else "FAIL"
        return f"{outcome}  {self.name}: expected {self.expected} (tolerance {self.tolerance}), got {self.got}"


@dataclass(frozen=True)
class Watch:
    """How a measurement reports and stops.

    Attributes:
        on_step: called with the number of finished steps and a loss.
        should_stop: True asks the measurement to stop at the next chance.
        checkpoint: file where an unfinished measurement keeps its state.
    """

    on_step: Callable[[int, float], None] | None = None
    should_stop: Callable[[], bool] | None = None
    checkpoint: Path | None = None


def figure_names() -> list[str]:
    """Names of the figures of this package, found by scanning the folder: ``gpt-optimizers`` for ``gpt_optimizers.py``."""
    package = importlib.import_module("specgrad.figures")
    return sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def load_figure(name: str) -> ModuleType:
    """The module of a figure.

    Raises:
        ValueError: for an unknown name, with the nearest known one.
    """
    names = figure_names()
    if name not in names:
        import difflib

        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"`figure` must be one of {', '.join(names)}; got {name!r}.{hint}")
    return importlib.import_module(f"specgrad.figures.{name.replace('-', '_')}")


def claim(figure: ModuleType) -> str:
    """The first sentence of the figure's docstring."""
    return (figure.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


def run_of(figure: ModuleType, config: Any) -> Run:
    """The run that a configuration stands for."""
    if hasattr(figure, "identity"):
        identity = figure.identity(config)
    else:
        identity = {k: v for k, v in dataclasses.asdict(config).items() if k != "seed"}
    return Run(figure.EXPERIMENT, identity, config.seed, code_version(*figure.CODE))
