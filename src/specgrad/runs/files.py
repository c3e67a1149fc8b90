"""Damaged files are kept, named and stepped around, never silently dropped."""

import warnings
from pathlib import Path


def set_aside(file: Path, error: Exception) -> None:
    """Renames a damaged file, so that it is kept but not in the way, and warns."""
    damaged = file.with_name(f"{file.name}.damaged")
    file.replace(damaged)
    warnings.warn(f"{file} cannot be read ({error}); it is kept as {damaged.name} and its run is done again.", stacklevel=3)
