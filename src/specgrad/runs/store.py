"""`Store`: a folder with one parquet file per finished run, written whole or not at all."""

import json
import os
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl

from specgrad.runs.files import atomic, remove_abandoned, set_aside
from specgrad.runs.provenance import code_version
from specgrad.runs.run import Run, settings_columns

_METADATA = "specgrad"
_UNREADABLE = (OSError, pl.exceptions.PolarsError, ValueError, KeyError)


class Store:
    """Finished runs in a folder, which any number of processes and machines may share.

    A run's table, configuration and provenance are one parquet file named by the run's key, readable by any parquet
    reader; it appears by an atomic rename, so a killed process leaves no half file. Next to it an unfinished run may keep
    a checkpoint, and a failed one the record of its failure.

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
        remove_abandoned(self.path)

    def __contains__(self, run: Run) -> bool:
        file = self.file(run)
        if not file.exists():
            return False
        try:
            _about(file)
        except _UNREADABLE as error:
            set_aside(file, error)
            return False
        return True

    def file(self, run: Run) -> Path:
        """Where the finished run lies, or will lie."""
        return self.path / f"{run.key}.parquet"

    def checkpoint(self, run: Run) -> Path:
        """Where an unfinished run keeps its state."""
        return self.path / f"{run.key}.checkpoint.pt"

    def write(self, run: Run, records: list[dict[str, Any]], provenance: dict[str, Any]) -> pl.DataFrame:
        """Stores a finished run; removes its checkpoint and the record of an earlier failure.

        Args:
            run: what was run.
            records: rows; they need not have the same keys.
            provenance: see `specgrad.runs.provenance`.

        Returns:
            The table, as `read` will give it.
        """
        table = pl.DataFrame(records, infer_schema_length=None)
        metadata = {_METADATA: json.dumps(run.about | {"provenance": provenance})}
        with atomic(self.file(run)) as temporary:
            table.write_parquet(temporary, metadata=metadata)
        self.checkpoint(run).unlink(missing_ok=True)
        self._failure_file(run).unlink(missing_ok=True)
        return table

    def read(self, run: Run) -> pl.DataFrame:
        """Table of a finished run.

        Raises:
            KeyError: if the run is not in the store, or its file is damaged and was set aside.
        """
        if run in self:
            try:
                return pl.read_parquet(self.file(run))
            except _UNREADABLE as error:
                set_aside(self.file(run), error)
        raise KeyError(f"run {run.key} is not in the store {self.path}")

    def about(self, run: Run) -> dict[str, Any]:
        """Experiment, configuration, seed, code version and provenance stored with a finished run."""
        return _about(self.file(run))

    def write_failure(self, run: Run, trace: str, provenance: dict[str, Any]) -> None:
        """Records that a run failed.

        Args:
            run: what was run.
            trace: traceback, or what is known instead.
            provenance: see `specgrad.runs.provenance`.
        """
        content = run.about | {"traceback": trace, "provenance": provenance}
        with atomic(self._failure_file(run)) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def failure(self, run: Run) -> str | None:
        """Traceback of a failed run; None if it did not fail."""
        try:
            content: dict[str, str] = json.loads(self._failure_file(run).read_text(encoding="utf-8"))
            return content["traceback"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            set_aside(self._failure_file(run), error)
            return None

    def _failure_file(self, run: Run) -> Path:
        return self.path / f"{run.key}.failed.json"

    def table(self, figure: str | ModuleType) -> pl.LazyFrame:
        """All finished runs of an experiment under each other, scanned lazily.

        Files that are damaged or not runs are named in a warning and left out.

        Args:
            figure: name of an experiment, for runs of every version of the code; or a figure module, for runs of its
                ``EXPERIMENT`` by the present version of its ``CODE``.

        Returns:
            The records, with ``key``, ``seed`` and the scalar settings of their run as further columns.

        Raises:
            KeyError: if there is no such run.
        """
        experiment = figure if isinstance(figure, str) else str(figure.EXPERIMENT)
        code = None if isinstance(figure, str) else code_version(*figure.CODE)
        scans = []
        for file in sorted(self.path.glob("*.parquet")):
            try:
                about = _about(file)
                names = pl.read_parquet_schema(file)
            except _UNREADABLE as error:
                warnings.warn(f"{file} is left out: {error}", stacklevel=2)
                continue
            if about["experiment"] == experiment and code in (None, about["code"]):
                columns = {"key": file.stem} | settings_columns(about["config"], about["seed"])
                scans.append(
                    pl.scan_parquet(file).with_columns(pl.lit(v).alias(k) for k, v in columns.items() if k not in names)
                )
        if not scans:
            version = "" if code is None else f" by the present version {code} of its code"
            raise KeyError(f"the store {self.path} has no finished run of {experiment!r}{version}")
        return pl.concat(scans, how="diagonal_relaxed")


def _about(file: Path) -> dict[str, Any]:
    """What a run's file says of itself; raises one of `_UNREADABLE` for any other file."""
    metadata = pl.read_parquet_metadata(file)
    if _METADATA not in metadata:
        raise ValueError("it was not written by specgrad")
    about: dict[str, Any] = json.loads(metadata[_METADATA])
    if not re.fullmatch(re.escape(str(about["experiment"])) + r"-[0-9a-f]{16}", file.stem):
        raise ValueError(f"its name does not fit the run inside, which is of the experiment {about['experiment']!r}")
    return about
