"""specgrad: spectral optimizers such as Muon, and the theory that says when, where and why they win.

``linalg`` (matrix kernels), ``optim`` (optimizers and routing) and ``probe`` (which layers want a spectral update) are
imported with the package; the labs (``gpt``, ``memory``, ``aim``) and ``data``, ``runs``, ``stats``, ``figures``,
``plots``, ``pages``, ``report`` on first use.
"""

import importlib
from types import ModuleType

from specgrad import linalg, optim, probe
from specgrad.probe import Probe

__version__ = "0.1.0"
_LAZY = ("aim", "data", "figures", "gpt", "memory", "pages", "plots", "report", "runs", "stats")
__all__ = ["Probe", "linalg", "optim", "probe", *_LAZY]


def __getattr__(name: str) -> ModuleType:
    if name in _LAZY:
        return importlib.import_module(f"specgrad.{name}")
    raise AttributeError(f"module 'specgrad' has no attribute {name!r}")
