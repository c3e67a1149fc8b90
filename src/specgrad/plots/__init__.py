"""The one style of all plots, and drawing helpers that know no lab."""

from specgrad.plots.compare import compare
from specgrad.plots.heatmap import ratio_heat_map
from specgrad.plots.style import COLOURS, MARKERS, save_figure, style

__all__ = ["COLOURS", "MARKERS", "compare", "ratio_heat_map", "save_figure", "style"]
