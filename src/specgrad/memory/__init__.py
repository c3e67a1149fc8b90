"""Linear associative memory: how many facts one matrix stores after a few steps of gradient descent, Muon or Newton."""

from specgrad.memory import theory
from specgrad.memory.dynamics import Run, one_step, simulate
from specgrad.memory.gradient import (
    gradient,
    gradient_and_loss,
    hessian_product,
    loss,
    start_hessian,
    uncentred_gradient,
)
from specgrad.memory.mean_field import Estimate, MeanFieldWarning, estimate_gradient
from specgrad.memory.observables import capacity, capacity_of, leave_one_out_spectrum, polar_shortfall
from specgrad.memory.schedules import fixed_rates, line_search
from specgrad.memory.scoring import margins, recovered, recovered_by_definition
from specgrad.memory.task import Task
from specgrad.memory.thresholded import simulate_thresholded
from specgrad.memory.updates import Update, direction, quintic_polar

__all__ = [
    "Estimate",
    "MeanFieldWarning",
    "Run",
    "Task",
    "Update",
    "capacity",
    "capacity_of",
    "direction",
    "estimate_gradient",
    "fixed_rates",
    "gradient",
    "gradient_and_loss",
    "hessian_product",
    "leave_one_out_spectrum",
    "line_search",
    "loss",
    "margins",
    "one_step",
    "polar_shortfall",
    "quintic_polar",
    "recovered",
    "recovered_by_definition",
    "simulate",
    "simulate_thresholded",
    "start_hessian",
    "theory",
    "uncentred_gradient",
]
