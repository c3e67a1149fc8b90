"""`Store`: a folder with one parquet file per finished run, written whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

import polars as pl

from specgrad.runs.files import set_aside
from specgrad.runs.run import Run

_METADATA = "specgrad"


class Store:
    """Finished runs in a folder.

    A run's table, configuration and provenance are one parquet file named by the run's key; it appears by an atomic
    rename, so a killed process leaves no half file. Next to it an unfinished run may keep a checkpoint.

    Args:
        path: the folder; created if missing.

    Raises:
        ValueError: if the folder cannot be created or written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"`path` of `Store` must be a writable folder; got {str(self.path)!r} ({error.strerror})."
            ) from error

    def __contains__(self, run: Run) -> bool:
        file = self.file(run)
        if not file.exists():
            return False
        try:
            return _METADATA in pl.read_parquet_metadata(file) and pl.read_parquet(file).height >= 0
        except (OSError, pl.exceptions.PolarsError) as error:
            set_aside(file, error)
            return False

    def file(self, run: Run) -> Path:
        """Where the finished run lies, or will lie."""
        return self.path / f"{run.key}.parquet"

    def checkpoint(self, run: Run) -> Path:
        """Where an unfinished run keeps its state."""
        return self.path / f"{run.key}.checkpoint.pt"

    def write(self, run: Run, records: list[dict[str, Any]], provenance: dict[str, Any]) -> pl.DataFrame:
        """Stores a finished run and removes its checkpoint.

        Args:
            run: what was run.
            records: rows; they need not have the same keys.
            provenance: see `specgrad.runs.provenance`.

        Returns:
            The table, as `read` will give it.
        """
        table = pl.DataFrame(records, infer_schema_length=None)
        about = {"experiment": run.experiment, "config": run.config, "seed": run.seed, "code": run.code}
        metadata = {_METADATA: json.dumps(about | {"provenance": provenance})}
        temporary = self.path / f".{run.key}.{os.getpid()}.tmp"
        try:
            table.write_parquet(temporary, metadata=metadata)
            temporary.replace(self.file(run))
        finally:
            temporary.unlink(missing_ok=True)
        self.checkpoint(run).unlink(missing_ok=True)
        return table

    def read(self, run: Run) -> pl.DataFrame:
        """Table of a finished run.

        Raises:
            KeyError: if the run is not in the store.
        """
        if run not in self:
            raise KeyError(f"run {run.key} is not in the store {self.path}")
        return pl.read_parquet(self.file(run))

    def about(self, run: Run) -> dict[str, Any]:
        """Configuration, seed, code version and provenance stored with a finished run."""
        about: dict[str, Any] = json.loads(pl.read_parquet_metadata(self.file(run))[_METADATA])
        return about
