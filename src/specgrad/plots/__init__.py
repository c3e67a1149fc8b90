"""The one style of all plots, and drawing helpers that know no lab."""

from specgrad.plots.heatmap import ratio_heat_map
from specgrad.plots.style import COLOURS, MARKERS, save_figure, style

__all__ = ["COLOURS", "MARKERS", "ratio_heat_map", "save_figure", "style"]
