"""The probe: does a spectral step beat a Euclidean one, layer by layer?"""

from specgrad.probe.condition import Condition, condition
from specgrad.probe.probe import Probe
from specgrad.probe.report import LayerSummary, ProbeReport, summarise_layers

__all__ = ["Condition", "LayerSummary", "Probe", "ProbeReport", "condition", "summarise_layers"]
