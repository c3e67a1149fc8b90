"""For the linear activation, truncations are Taylor polynomials in time: higher orders follow SGD longer, up to a radius.

The exact curve at infinite dimension follows SGD over the whole run.
"""

from specgrad.figures._aim import PAPER
from specgrad.figures._aim_truncation import CODE, EXPERIMENT, Config, check, draw, measure

FIGURE = "figure 4: truncation orders against online SGD, linear activation, one token"
MINUTES = {"quick": 0.05, "paper": 0.6}
PRESETS = {
    "quick": [Config("h1", lr=0.005, t_max=0.3)],
    "paper": [Config("h1", dim=400, lr=0.01, draws=2, t_max=0.3, orders=(4, 8, 12, 16))],
}

__all__ = ["CODE", "EXPERIMENT", "FIGURE", "MINUTES", "PAPER", "PRESETS", "Config", "check", "draw", "measure"]
