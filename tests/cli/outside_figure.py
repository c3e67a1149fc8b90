"""Halves are half.

A figure from outside the package.
"""

from dataclasses import dataclass

import matplotlib.pyplot as plt

from specgrad.figures._figure import Check

PAPER, FIGURE, EXPERIMENT, CODE = "nobody2020", "table 1", "halves", ("outside_figure",)


@dataclass(frozen=True)
class Config:
    """What is halved.

    Attributes:
        number: what is halved.
        steps: how often it is said.
        expected: what should come out.
        seed: seed.
    """

    number: float = 3.0
    steps: int = 2
    expected: float | None = None
    seed: int = 0

    def __post_init__(self):
        if self.number < 0:
            raise ValueError(f"`number` must be >= 0; got {self.number}.")


PRESETS = {"quick": [Config(), Config(5.0)], "paper": [Config(number=float(n)) for n in range(9)]}


def measure(config, watch):
    if config.number == 13:
        raise ArithmeticError("thirteen")
    return [{"step": step, "half": config.number / 2} for step in range(config.steps)]


def check(table):
    expected = table["expected"][0] if "expected" in table.columns else None
    right = all(h == (n / 2 if expected is None else expected) for h, n in table.select("half", "number").iter_rows())
    return [Check("halves", "half", "none", str(table["half"].to_list()), right)]


def draw(table):
    figure, axes = plt.subplots()
    axes.plot(table["number"], table["half"], "o")
    return figure
