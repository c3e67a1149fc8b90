"""For softmax on two tokens, truncations of the moment hierarchy follow SGD the longer the higher their order.

The exact curve at infinite dimension follows SGD over the whole run.
"""

from specgrad.figures._aim import PAPER
from specgrad.figures._aim_truncation import CODE, EXPERIMENT, Config, check, draw, measure

FIGURE = "figure 1: truncation orders against online SGD, softmax, two tokens"
MINUTES = {"quick": 0.1, "paper": 13}
PRESETS = {
    "quick": [Config()],
    "paper": [Config(dim=400, lr=0.01, draws=2, orders=(4, 8, 12, 16))],
}

__all__ = ["CODE", "EXPERIMENT", "FIGURE", "MINUTES", "PAPER", "PRESETS", "Config", "check", "draw", "measure"]
