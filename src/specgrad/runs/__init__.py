"""Runs: seeds, keys, storage and provenance of experiments; knows no lab."""

from typing import TYPE_CHECKING, Any

from specgrad.runs.provenance import code_version, provenance
from specgrad.runs.run import Run
from specgrad.runs.seeds import stream

if TYPE_CHECKING:
    from specgrad.runs.store import Store

__all__ = ["Run", "Store", "code_version", "provenance", "stream"]


def __getattr__(name: str) -> Any:
    # The store needs polars, which the labs themselves do without.
    if name != "Store":
        raise AttributeError(f"module 'specgrad.runs' has no attribute {name!r}")
    try:
        from specgrad.runs.store import Store
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"specgrad.runs.Store needs the extra `lab` (missing: {error.name}). Run: pip install 'specgrad[lab]'",
            name=error.name,
        ) from error
    return Store
