"""What the probe costs: CPU time of training steps with and without it, interleaved rounds, medians of ratios, one process.

Run ``python benchmarks/bench_probe.py [--threads 1] [--rounds 9] [--size small] [--update muon]``. The rival is the same
training without a probe; the limit is the time that the probe's own FLOPs would take at the rate of a float32 product
measured in the same process.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from specgrad import Probe, gpt
from specgrad.probe import measure_advantage, measure_gain


def cpu_seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def product_rate() -> float:
    """Float32 FLOPs per CPU second of a 768 x 768 product."""
    matrix = torch.randn(768, 768)
    return 2 * 768**3 / min(cpu_seconds(lambda: matrix @ matrix) for _ in range(10))


class Training:
    """The demo's training, a step at a time."""

    def __init__(self, size: str, mlp: str, update: str) -> None:
        self.task = gpt.Task(size=size, mlp=mlp)
        recipe = gpt.Recipe(update, *gpt.tuned_rates(update, mlp), steps=10_000)
        self.model = self.task.model()
        self.optimizer = recipe.optimizer(self.model)
        self.count = 0

    def steps(self, number: int, probe: Probe | None = None) -> None:
        """Whole optimizer steps."""
        for _ in range(number):
            gpt.loss(self.model, self.task.batch(self.count)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.count += 1
            if probe is not None:
                probe.step()

    def backward(self) -> None:
        """Forward and backward alone."""
        gpt.loss(self.model, self.task.batch(0)).backward()
        self.optimizer.zero_grad()


def overhead(training: Training, rounds: int, steps: int, probe: Probe) -> list[float]:
    """Extra time of ``steps`` probed steps over unprobed ones before and after them, by round."""
    ratios = []
    with probe:
        training.steps(probe.every if probe.every <= steps else steps, probe)  # warm starts
    plain = cpu_seconds(lambda: training.steps(steps))
    for _ in range(rounds):
        with probe:
            probe.resume_at(0)
            probed = cpu_seconds(lambda: training.steps(steps, probe))
        after = cpu_seconds(lambda: training.steps(steps))
        ratios.append(2 * probed / (plain + after) - 1)
        plain = after
    return ratios


def show(name: str, ratios: list[float], goal: str) -> None:
    print(f"  {name:<34} {statistics.median(ratios):+7.1%}  [{min(ratios):+.1%}, {max(ratios):+.1%}]  goal {goal}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", default="small")
    parser.add_argument("--mlp", default="relu2")
    parser.add_argument("--update", default="muon")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    training = Training(options.size, options.mlp, options.update)
    model = training.model
    training.steps(30)
    step = statistics.median(cpu_seconds(lambda: training.steps(1)) for _ in range(9))
    both = statistics.median(cpu_seconds(training.backward) for _ in range(9))
    print(f"{options.size}, {options.mlp}, {options.update}: step {1e3 * step:.0f} ms, of it backward {1e3 * both:.0f} ms")
    print(f"  float32 products at {product_rate() / 1e9:.0f} GFLOP/s")
    idle = Probe(model, every=10**9)
    idle.resume_at(1)
    with idle:
        ratios = []
        for _ in range(options.rounds):
            plain, watched = (cpu_seconds(lambda p=p: training.steps(5, p)) for p in (None, idle))
            ratios.append(watched / plain - 1)
    show("between measured steps", ratios, "<= 2 %")
    show("every=1", overhead(training, options.rounds, 3, Probe(model, every=1)), "<= 25 %")
    show("every=10", overhead(training, options.rounds, 10, Probe(model, every=10)), "<= 3 %")
    exact = overhead(training, options.rounds, 1, Probe(model, every=1, exact=True))
    show("exact, every=50 (a fiftieth)", [ratio / 50 for ratio in exact], "<= 5 %")
    batch = training.task.batch(0)
    inputs, targets = batch[:, :-1], batch[:, 1:]
    for draws in (1, 4, 16):
        found = []
        for _ in range(5):
            took = cpu_seconds(lambda d=draws: measure_advantage(model, inputs, targets, draws=d))
            found.append(took / statistics.median(cpu_seconds(training.backward) for _ in range(3)))
        total = statistics.median(found)
        print(f"  level 2, {draws:>2} draws: {total:.1f} forward and backward passes, {total - 1:.1f} beyond the gradient")
    took = cpu_seconds(lambda: measure_gain(model, inputs, targets))
    print(f"  level 3, all blocks: {took / both:.0f} forward and backward passes")


if __name__ == "__main__":
    main()
