"""The attention-indexed-models lab: simulation against its products and random numbers, theories against their rivals.

Run ``python benchmarks/bench_aim.py [--threads 1] [--rounds 5]``. CPU time, interleaved rounds, medians of ratios.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from specgrad.aim import Task, simulate, solve
from specgrad.aim.hierarchy import initial_moments, make_hierarchy


def cpu_seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def ratio_of(fast: Callable[[], object], slow: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median, least and largest of slow over fast, interleaved, after one warm-up."""
    fast(), slow()
    ratios = []
    for _ in range(rounds):
        mine = cpu_seconds(fast)
        ratios.append(cpu_seconds(slow) / mine)
    return statistics.median(ratios), min(ratios), max(ratios)


def step_limit(dim: int, batch_size: int, tokens: int, products: int) -> Callable[[], object]:
    """Random numbers and matrix products of a step, and nothing else: ``products`` of (batch tokens) x dim x dim."""
    generator = torch.Generator().manual_seed(0)
    x = torch.empty(batch_size * tokens, dim)
    w = torch.randn(dim, dim)
    y, gradient = torch.empty(batch_size * tokens, dim), torch.empty(dim, dim)

    def run() -> None:
        for _ in range(STEPS):
            x.normal_(generator=generator)
            for product in range(products):
                # The last product is the gradient's, of the same size.
                if product == products - 1:
                    torch.mm(x.T, y, out=gradient)
                else:
                    torch.mm(x, w, out=y)

    return run


STEPS = 60


def simulation(rounds: int) -> None:
    print("simulate: share of the limit (random numbers and products, same process)")
    cases = [
        ("tied h1, d=400, B=512", Task(dim=400, activation="h1"), 2, 3),
        ("tied softmax, 2 tokens, d=400, B=512", Task(dim=400, activation="softmax", tokens=2), 2, 3),
        ("direct h2, d=400, B=512", Task(dim=400, activation="h2", attention="direct"), 2, 3),
    ]
    for name, task, needed, plain in cases:
        lr = 1e-4
        unit = (4 if task.attention == "tied" else 1) * lr / 400
        # Two lengths, so that drawing the matrices and measuring at both ends cancel.
        long = [0.0, 2 * STEPS * unit]
        short = [0.0, STEPS * unit]

        def run(times: list[float], task: Task = task, lr: float = lr) -> Callable[[], object]:
            return lambda: simulate(task, lr=lr, batch_size=512, t_eval=times)

        for label, products in (("products it needs", needed), ("plain products", plain)):
            limit = step_limit(400, 512, task.tokens, products)
            limit()
            shares = []
            for _ in range(rounds):
                mine = cpu_seconds(run(long)) - cpu_seconds(run(short))
                shares.append(cpu_seconds(limit) / mine)
            print(
                f"  {name:<38} {label} ({products}): {statistics.median(shares):.2f} [{min(shares):.2f}, {max(shares):.2f}]"
            )


def hierarchy(rounds: int) -> None:
    print("hierarchy: right-hand side on all words over classes (at least 12 at order 16 wanted)")
    task = Task(activation="h1", student_scale=1.0, teacher_scale=1.0)
    for order in (8, 12, 16):
        merged = make_hierarchy(task, order)
        start = initial_moments(task, merged.space)
        full = make_hierarchy(task, order, merge=False)
        # Every word has its class's moment.
        classes = np.concatenate(merged.space.class_of)
        calls = 400 if order == 8 else 60

        def repeat(which, state, calls=calls):  # type: ignore[no-untyped-def]
            return lambda: [which.rhs(0.0, state) for _ in range(calls)]

        median, low, high = ratio_of(repeat(merged, start), repeat(full, start[classes]), rounds)
        print(f"  order {order:>2}: {len(start)} classes, {len(classes)} words: {median:.1f} [{low:.1f}, {high:.1f}]")


def closure(rounds: int) -> None:
    print("closure m = 4 (from the same draw): matrix flow d = 200 over closure (at least 20 wanted), largest error")
    for name, scale in (("h2", 0.5), ("tanh", 0.5)):
        task = Task(dim=200, activation=name, student_scale=scale, teacher_scale=scale)
        limit = Task(activation=name, student_scale=scale, teacher_scale=scale)
        times = np.linspace(0, 1, 21)
        small = lambda limit=limit, times=times: solve(limit, "closure", t_eval=times, rtol=1e-6)  # noqa: E731
        large = lambda task=task, times=times: solve(task, "flow", t_eval=times, seed=0, rtol=1e-6)  # noqa: E731
        median, low, high = ratio_of(small, large, max(2, rounds // 2))
        flow, same = large(), solve(task, "closure", t_eval=times, seed=0, rtol=1e-6)
        error = max(np.abs(same[c] / flow[c] - 1).max() for c in ("t1", "q11", "q12"))
        print(f"  {name}: {median:.0f} [{low:.0f}, {high:.0f}], error {error:.2%}")


def exact(rounds: int) -> None:
    print("exact: seconds to the end of the trajectory (0.2 s wanted for polynomials)")
    for name, scale, tokens, end in (
        ("h1", 1.0, 1, 3.0),
        ("h2", 0.5, 1, 2.0),
        ("h3", 0.5, 1, 2.0),
        ("softmax", 1.0, 2, 6.0),
    ):
        task = Task(activation=name, student_scale=scale, teacher_scale=scale, tokens=tokens)
        solve(task, "exact", t_max=end)
        seconds = [cpu_seconds(lambda task=task, end=end: solve(task, "exact", t_max=end)) for _ in range(rounds)]
        print(f"  {name}: {statistics.median(seconds):.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    exact(options.rounds)
    hierarchy(options.rounds)
    closure(options.rounds)
    simulation(options.rounds)


if __name__ == "__main__":
    main()
