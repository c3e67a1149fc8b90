"""Attention-indexed models: exact and truncated theories of how attention matrices are learned, and SGD beside them."""

from specgrad.aim.dynamics import simulate
from specgrad.aim.observables import correlation, records
from specgrad.aim.potential import Evaluation, Potential
from specgrad.aim.solve import solve
from specgrad.aim.task import Task

__all__ = ["Evaluation", "Potential", "Task", "correlation", "records", "simulate", "solve"]
