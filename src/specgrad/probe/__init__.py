"""The probe: does a spectral step beat a Euclidean one, layer by layer?"""

from specgrad.probe.advantage import measure_advantage
from specgrad.probe.advice import CriticalBatch, critical_batch
from specgrad.probe.condition import Condition, condition
from specgrad.probe.gain import measure_gain
from specgrad.probe.likelihoods import Likelihood, likelihood_of
from specgrad.probe.probe import Probe
from specgrad.probe.report import Audit, ProbeReport, audit
from specgrad.probe.routing import Evidence
from specgrad.probe.summary import LayerSummary, summarise_layers

__all__ = [
    "Audit",
    "Condition",
    "CriticalBatch",
    "Evidence",
    "LayerSummary",
    "Likelihood",
    "Probe",
    "ProbeReport",
    "audit",
    "condition",
    "critical_batch",
    "likelihood_of",
    "measure_advantage",
    "measure_gain",
    "summarise_layers",
]
