"""Runs: seeds, keys, storage, sweeps and provenance of experiments; knows no lab."""

import importlib
from typing import TYPE_CHECKING, Any

from specgrad.runs.interrupt import Interrupted
from specgrad.runs.provenance import code_version, provenance
from specgrad.runs.run import Run
from specgrad.runs.seeds import stream
from specgrad.runs.tracking import tracker
from specgrad.runs.watch import Watch

if TYPE_CHECKING:
    from specgrad.runs.store import Store
    from specgrad.runs.sweeps import Status, status, sweep

__all__ = [
    "Interrupted",
    "Run",
    "Status",
    "Store",
    "Watch",
    "code_version",
    "provenance",
    "status",
    "stream",
    "sweep",
    "tracker",
]

# These need polars and rich, which the labs themselves do without.
_NEED_EXTRA = {"Store": "store", "Status": "sweeps", "status": "sweeps", "sweep": "sweeps"}


def __getattr__(name: str) -> Any:
    if name not in _NEED_EXTRA:
        raise AttributeError(f"module 'specgrad.runs' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"specgrad.runs.{_NEED_EXTRA[name]}"), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"specgrad.runs.{name} needs the extra `lab` (missing: {error.name}). Run: pip install 'specgrad[lab]'",
            name=error.name,
        ) from error
