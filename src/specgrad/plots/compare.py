"""`compare`: theory as a line, simulation as markers with standard errors, one panel per quantity."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specgrad.plots.style import style

# More markers than this cover the line that they are compared with.
_MOST_MARKERS = 25


def compare(
    simulation: Any,
    theory: Any,
    columns: Sequence[str],
    *,
    x: str = "t",
    xlabel: str | None = None,
    colour: str = "#0072B2",
    axes: Sequence[Axes] | None = None,
) -> Figure:
    """Draws columns of a simulation over those of a theory.

    Both are tables by column name: a mapping of arrays, a polars table, or a list of records. A column is as long as
    ``x``, where equal x are repetitions, or has a leading axis of seeds. Markers are means over repetitions, with the
    standard error as a bar where there are at least two; long simulations are thinned to equally spaced markers.

    Args:
        simulation: what was measured.
        theory: what was predicted, on x values of its own; None draws markers only.
        columns: quantities to show, each in both tables.
        x: name of the abscissa.
        xlabel: its label, with the unit; default: its name.
        colour: colour of the markers; the theory is black.
        axes: one per column, to draw into; default: a new figure.

    Raises:
        ValueError: for a column that a table does not have.

    Example:
        >>> t = np.linspace(0, 1, 5)
        >>> figure = compare({"t": t, "loss": np.stack([t, t + 0.1])}, {"t": t, "loss": t}, ["loss"])
        >>> len(figure.axes)
        1
    """
    measured, predicted = _table(simulation), None if theory is None else _table(theory)
    for name, table in (("simulation", measured), ("theory", predicted)):
        absent = [] if table is None else [c for c in (x, *columns) if c not in table]
        if table is not None and absent:
            raise ValueError(
                f"`columns` of `compare` must be in both tables; {name} lacks {absent[0]!r}, it has {sorted(table)}."
            )
    with style():
        if axes is None:
            figure, grid = plt.subplots(1, len(columns), figsize=(0.6 + 2.6 * len(columns), 2.6), squeeze=False)
            axes = list(grid[0])
        else:
            figure = axes[0].get_figure()  # type: ignore[assignment]
        for panel, column in zip(axes, columns, strict=True):
            if predicted is not None:
                places, means, _ = _means(predicted[x], predicted[column])
                panel.plot(places, means, color="black", linewidth=1.2, label="theory")
            _markers(panel, *_means(measured[x], measured[column]), colour)
            panel.set(xlabel=xlabel or x, title=column)
        axes[0].legend()
    return figure


def _markers(panel: Axes, places: np.ndarray, means: np.ndarray, errors: np.ndarray, colour: str) -> None:
    shown = np.unique(np.linspace(0, len(places) - 1, min(len(places), _MOST_MARKERS)).round().astype(int))
    bars = errors[shown] if np.isfinite(errors[shown]).any() else None
    panel.errorbar(
        places[shown], means[shown], yerr=bars, fmt="o", markersize=3.5, color=colour, elinewidth=1, label="simulation"
    )


def _table(table: Any) -> dict[str, np.ndarray]:
    if isinstance(table, Mapping):
        return {str(name): np.asarray(values, dtype=float) for name, values in table.items() if _numeric(values)}
    if hasattr(table, "to_dict") and hasattr(table, "columns"):
        return {name: table[name].to_numpy() for name in table.columns if _numeric(table[name].to_numpy())}
    return {
        name: np.asarray([r[name] for r in table], dtype=float) for name in table[0] if _numeric([r[name] for r in table])
    }


def _numeric(values: Any) -> bool:
    return np.asarray(values).dtype.kind in "fiub"


def _means(x: np.ndarray, y: np.ndarray) -> tuple[Float[np.ndarray, " k"], Float[np.ndarray, " k"], Float[np.ndarray, " k"]]:
    """Distinct x, mean of y at each and its standard error; NaN for a single value."""
    if y.ndim == 2:
        x = np.broadcast_to(x, y.shape)
    places, index, counts = np.unique(x.ravel(), return_inverse=True, return_counts=True)
    y = y.ravel().astype(float)
    means = np.bincount(index, y) / counts
    squares = np.bincount(index, (y - means[index]) ** 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        errors = np.sqrt(squares / (counts - 1) / counts)
    return places.astype(float), means, errors
