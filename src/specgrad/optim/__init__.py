"""Spectral optimizers, and the routing that decides which parameter gets one."""

from specgrad.optim.groups import ParamGroups, Route, param_groups
from specgrad.optim.muon import Muon
from specgrad.optim.scaling import shape_factor
from specgrad.optim.spectral import SpectralOptimizer

__all__ = ["Muon", "ParamGroups", "Route", "SpectralOptimizer", "param_groups", "shape_factor"]
