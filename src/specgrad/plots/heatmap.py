"""Heat maps of a ratio on a logarithmic, two-sided colour scale."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm


def ratio_heat_map(
    axes: Axes,
    ratios: Float[np.ndarray, "rows columns"],
    rows: Sequence[str],
    columns: Sequence[int],
    *,
    span: float = 16.0,
) -> ScalarMappable:
    """Draws ratios around 1; undefined cells stay grey.

    Args:
        axes: where to draw.
        ratios: one row per name in ``rows``, one column per entry of ``columns``; NaN where undefined.
        rows: labels of the rows.
        columns: labels of the columns, every few of which are shown.
        span: colours run from ``1/span`` to ``span``.

    Returns:
        The mappable, for a colour bar.
    """
    axes.set_facecolor("#cccccc")
    image = axes.imshow(ratios, norm=LogNorm(1 / span, span), cmap="RdBu", aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(rows)), rows)
    shown = range(0, len(columns), max(1, -(-len(columns) // 6)))
    axes.set_xticks(list(shown), [str(columns[i]) for i in shown])
    axes.grid(visible=False)
    axes.tick_params(length=0)
    return image
