"""Small language models on real text: which optimizer learns fastest, and what the probe says on the way."""

from specgrad.gpt import theory
from specgrad.gpt.dynamics import simulate
from specgrad.gpt.model import SIZES, Decoder, Size
from specgrad.gpt.observables import paired_difference, sequence_losses, share_of_gain
from specgrad.gpt.recipes import LABELS, Recipe, recorded_sweep, tuned_rates
from specgrad.gpt.task import Task, loss
from specgrad.runs.interrupt import Interrupted

__all__ = [
    "LABELS",
    "SIZES",
    "Decoder",
    "Interrupted",
    "Recipe",
    "Size",
    "Task",
    "loss",
    "paired_difference",
    "recorded_sweep",
    "sequence_losses",
    "share_of_gain",
    "simulate",
    "theory",
    "tuned_rates",
]
