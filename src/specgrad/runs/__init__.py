"""Runs: seeds, keys, storage and provenance of experiments; knows no lab."""

from specgrad.runs.provenance import code_version, provenance
from specgrad.runs.run import Run
from specgrad.runs.seeds import stream
from specgrad.runs.store import Store

__all__ = ["Run", "Store", "code_version", "provenance", "stream"]
