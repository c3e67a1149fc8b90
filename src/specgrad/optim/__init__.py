"""Spectral optimizers, and the routing that decides which parameter gets one."""

from specgrad.optim.blocks import Blocks
from specgrad.optim.checkpoints import convert_momentum
from specgrad.optim.groups import ParamGroups, Route, param_groups
from specgrad.optim.muon import Muon
from specgrad.optim.regularized_muon import RegularizedMuon
from specgrad.optim.scaling import shape_factor
from specgrad.optim.signsgd import SignSGD
from specgrad.optim.specgd import SpecGD
from specgrad.optim.spectral import SpectralOptimizer, StepReport

__all__ = [
    "Blocks",
    "Muon",
    "ParamGroups",
    "RegularizedMuon",
    "Route",
    "SignSGD",
    "SpecGD",
    "SpectralOptimizer",
    "StepReport",
    "convert_momentum",
    "param_groups",
    "shape_factor",
]
