"""Known answers, shared by the tests of this folder."""

import json
import math
from pathlib import Path

import numpy as np

from specgrad.aim import Task

FOLDER = Path(__file__).parents[1] / "reference"
AIM = json.loads((FOLDER / "aim.json").read_text())
EXACT = json.loads((FOLDER / "exact_tied.json").read_text())
NAMES = {"sm2": "softmax", "soft": "softmax"}

_i = np.arange(1, 7)
W1 = np.cos(1.3 * np.outer(_i, _i) + 0.7 * _i[:, None]) / math.sqrt(6)
W2 = np.sin(0.9 * np.outer(_i, _i) + 0.4 * _i[None, :]) / math.sqrt(6)


def activation(name):
    """Activation and number of tokens behind a name of the reference files."""
    found = NAMES.get(name, name)
    return {"activation": found, "tokens": 2 if found == "softmax" else 1}


def task_of(case):
    """Task and seed of a tied trajectory of the reference file."""
    settings = activation(case["act"]) | {"weight_decay": case["gamma"]}
    if case["init"] == "small_matrices":
        return Task(dim=6, student_matrix=W1, teacher_matrix=W2 @ W2.T, **settings), 0
    scale = float(case["init"].split("scale=")[1])
    return Task(student_scale=scale, teacher_scale=scale, **settings), None
