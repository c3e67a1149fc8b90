"""A small experiment for the tests of sweeps; workers import it by name."""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch

from specgrad.linalg import polar_factor
from specgrad.runs import Interrupted, Run, Store, stream, sweep


def measure(config, seed, watch):
    """Products large enough for several threads, and a polar factor: last bits show any difference in how they are done."""
    size = config.get("size", 96)
    matrix = torch.randn(size, size, generator=stream(seed, "matrix"))
    records = []
    for step in range(config["steps"]):
        matrix = polar_factor(matrix @ matrix.mT + matrix)
        records.append({"step": step, "sum": matrix.sum().item(), "norm": (matrix @ matrix).norm().item()})
        if watch.on_record is not None:
            watch.on_record(step, records[-1])
        if watch.on_step is not None:
            watch.on_step(step + 1, records[-1]["norm"])
        time.sleep(config.get("pause", 0))
        if watch.should_stop is not None and watch.should_stop() and step + 1 < config["steps"]:
            watch.checkpoint.write_text(str(step + 1))
            raise Interrupted(step + 1, watch.checkpoint)
    return records


def fail(config, seed, watch):
    if not Path(config["unless"]).exists():
        raise ArithmeticError(f"seed {seed} does not work")
    return [{"step": 0, "sum": 1.0}]


def die(config, seed, watch):
    os.kill(os.getpid(), signal.SIGKILL)


def run(seed, work=measure, experiment="toy", **config):
    config = {"steps": 3} | config
    return Run(experiment, config, seed, "1", partial(work, config, seed))


if __name__ == "__main__":
    # python experiment.py STORE WORKERS PAUSE: a sweep to be killed.
    folder, workers, pause = sys.argv[1:]
    runs = [run(seed, pause=float(pause)) for seed in range(6)]
    sweep(runs, Store(folder), int(workers) or None)
