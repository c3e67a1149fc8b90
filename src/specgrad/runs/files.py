"""Files appear whole or not at all; damaged ones are kept, named and stepped around, never silently dropped."""

import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# No file takes this long to be written; an older temporary one was left by a process that was killed.
_ABANDONED_SECONDS = 24 * 3600.0


@contextmanager
def atomic(file: Path) -> Iterator[Path]:
    """A temporary path to write to, which replaces ``file`` at the end of the context and vanishes after an exception.

    Every writer has its own, so processes on one or many machines may write the same file: the last one wins whole.
    """
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def remove_abandoned(folder: Path) -> None:
    """Removes temporary files that a killed process left more than a day ago."""
    for file in folder.glob(".*.tmp"):
        try:
            if time.time() - file.stat().st_mtime > _ABANDONED_SECONDS:
                file.unlink()
        except FileNotFoundError:  # another process was faster
            continue


def set_aside(file: Path, error: Exception) -> None:
    """Renames a damaged file, so that it is kept but not in the way, and warns."""
    damaged = file.with_name(f"{file.name}.damaged")
    try:
        file.replace(damaged)
    except FileNotFoundError:  # another process was faster
        return
    warnings.warn(f"{file} cannot be read ({error}); it is kept as {damaged.name} and its run is done again.", stacklevel=3)
