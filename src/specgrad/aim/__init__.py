"""Attention-indexed models: exact and truncated theories of how attention matrices are learned, and SGD beside them."""

from specgrad.aim.dynamics import simulate
from specgrad.aim.observables import correlation, records
from specgrad.aim.population import Gap, population_gap
from specgrad.aim.potential import Evaluation, Potential
from specgrad.aim.recovery import Convergence, convergence, initial_slope, polyak_constant, recovery_time, samples_at
from specgrad.aim.risk import MinimumRisk, minimum_risk
from specgrad.aim.solve import solve
from specgrad.aim.task import Task

__all__ = [
    "Convergence",
    "Evaluation",
    "Gap",
    "MinimumRisk",
    "Potential",
    "Task",
    "convergence",
    "correlation",
    "initial_slope",
    "minimum_risk",
    "polyak_constant",
    "population_gap",
    "records",
    "recovery_time",
    "samples_at",
    "simulate",
    "solve",
]
