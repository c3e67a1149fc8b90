"""The associative-memory lab against its rivals: CPU time, interleaved rounds, medians of ratios, one process, one thread.

Run ``python benchmarks/bench_memory.py [--rounds 5] [--items 100000] [--large]``. Scoring: pruned against chunked products
(extrapolated from 2048 rows; its cost is linear in rows and the masks are compared on those rows) and against the one-liner
that holds all N x N logits. Gradient: fused against autograd, and against the rate of a float32 product. End to end: one
point with gradient descent, Muon and Newton against drawing the embeddings and forming the first gradient.
"""

import argparse
import resource
import statistics
import time
import warnings
from collections.abc import Callable

import torch

from specgrad import memory

CHUNKED_ROWS = 2048


def cpu_seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def ratios(ours: Callable[[], object], rival: Callable[[], object], rounds: int, scale: float = 1.0) -> str:
    """Rival over ours, ``median [least, most]``, the rival's time multiplied by ``scale``."""
    ours(), rival()
    found = [scale * cpu_seconds(rival) / cpu_seconds(ours) for _ in range(rounds)]
    return f"{statistics.median(found):.1f} [{min(found):.1f}, {max(found):.1f}]"


def product_rate() -> float:
    """Float32 FLOPs per CPU second of a 1024 x 1024 product."""
    matrix = torch.randn(1024, 1024)
    return 2 * 1024**3 / min(cpu_seconds(lambda: matrix @ matrix) for _ in range(10))


def chunked(task: memory.Task, weight: torch.Tensor, rows: int) -> torch.Tensor:
    logits = task.embeddings[:rows] @ weight.T @ task.unembeddings.T
    index = torch.arange(rows)
    own = logits[index, index].clone()
    logits[index, index] = -torch.inf
    return own > logits.amax(1)


def scoring(items: int, rounds: int) -> None:
    print(f"scoring, N = {items}, float32: chunked / pruned")
    for dim in (64, 128, 256, 512):
        task = memory.Task(items, dim, 1.5, dtype=torch.float32)
        for update in ("muon", "gd"):
            weight = memory.one_step(task, update).float()
            mask = memory.recovered(task, weight)
            assert torch.equal(mask[:CHUNKED_ROWS], chunked(task, weight, CHUNKED_ROWS))
            got = ratios(
                lambda task=task, weight=weight: memory.recovered(task, weight),
                lambda task=task, weight=weight: chunked(task, weight, CHUNKED_ROWS),
                rounds,
                items / CHUNKED_ROWS,
            )
            print(f"  d = {dim:<4} {update:<5} {int(mask.sum()):>5} recovered  {got}")
    few = min(items, 20_000)
    print(f"scoring, N = {few}: one-liner / pruned")
    for dim in (64, 256):
        task = memory.Task(few, dim, 1.5, dtype=torch.float32)
        weight = memory.one_step(task, "muon").float()
        u, v, labels = task.unembeddings, task.embeddings, torch.arange(few)
        got = ratios(
            lambda task=task, weight=weight: memory.recovered(task, weight),
            lambda u=u, v=v, weight=weight, labels=labels: (v @ weight.T @ u.T).argmax(1) == labels,
            max(2, rounds // 2),
        )
        print(f"  d = {dim:<4} muon  {got}")


def gradients(rounds: int) -> None:
    items = 8000
    print(f"exact gradient at W != 0, N = {items}, float32; product rate {product_rate() / 1e9:.0f} GFLOP/s")
    for dim in (64, 128, 256, 512):
        task = memory.Task(items, dim, 1.5, dtype=torch.float32)
        weight = (dim**0.5 * memory.one_step(task, "muon")).float()
        labels, p = torch.arange(items), task.frequencies.float()

        def autograd(task=task, weight=weight, labels=labels, p=p):
            leaf = weight.clone().requires_grad_()
            logits = task.embeddings @ leaf.T @ task.unembeddings.T
            (torch.nn.functional.cross_entropy(logits, labels, reduction="none") @ p).backward()
            return leaf.grad

        fused = lambda task=task, weight=weight: memory.gradient(task, weight)  # noqa: E731
        got = ratios(fused, autograd, max(2, rounds // 2))
        print(f"  d = {dim:<4} autograd / fused {got}")
    items = 20_000
    print(f"exact gradient at W != 0, N = {items}: share of the product rate, counting 4 N^2 d FLOPs")
    for dim in (64, 128, 256):
        task = memory.Task(items, dim, 1.5, dtype=torch.float32)
        weight = (dim**0.5 * memory.one_step(task, "muon")).float()
        fused = lambda task=task, weight=weight: memory.gradient(task, weight)  # noqa: E731
        # The rate is measured before each round: neighbours on the machine change it.
        shares = [4 * items**2 * dim / product_rate() / cpu_seconds(fused) for _ in range(max(2, rounds // 2))]
        print(f"  d = {dim:<4} {statistics.median(shares):.2f} [{min(shares):.2f}, {max(shares):.2f}]")


def approximate(rounds: int) -> None:
    print("gradient at W != 0: exact / hybrid (4 d exact rows)")
    for items, dim in ((20_000, 128), (50_000, 128)):
        task = memory.Task(items, dim, 1.5, dtype=torch.float32)
        weight = dim**0.5 * memory.one_step(task, "muon")
        memory.gradient_and_loss(task, weight, task.sample(10))
        exact = lambda task=task, weight=weight: memory.gradient(task, weight)  # noqa: E731
        hybrid = lambda task=task, weight=weight: memory.estimate_gradient(task, weight)  # noqa: E731
        print(f"  N = {items}, d = {dim}: {ratios(hybrid, exact, 2)}")


def end_to_end(items: int, rounds: int) -> None:
    dim, costs = 256, []
    for seed in range(rounds):
        began = time.process_time()
        task = memory.Task(items, dim, 1.5, seed=seed, dtype=torch.float32)
        memory.gradient(task)
        base = time.process_time() - began
        began = time.process_time()
        task = memory.Task(items, dim, 1.5, seed=seed, dtype=torch.float32)
        for update in ("gd", "muon", "newton"):
            memory.capacity(task, memory.one_step(task, update))
        costs.append((time.process_time() - began) / base)
    print(f"one point with GD, Muon and Newton, N = {items}, d = {dim}, over embeddings and first gradient:")
    print(f"  {statistics.median(costs):.1f} [{min(costs):.1f}, {max(costs):.1f}]")


def large() -> None:
    began = time.process_time()

    def tell(step: int, loss: float) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"  step {step}: {time.process_time() - began:.0f} s since the start, peak memory {peak:.1f} GiB")

    print("hybrid Muon with line search, N = 1,000,000, d = 256, float32")
    task = memory.Task(1_000_000, 256, 1.5, dtype=torch.float32)
    memory.simulate(task, "muon", 3, gradient="hybrid", on_step=tell)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--large", action="store_true", help="three steps at a million items as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", memory.MeanFieldWarning)
    scoring(options.items, options.rounds)
    gradients(options.rounds)
    approximate(options.rounds)
    end_to_end(options.items, max(2, options.rounds // 2))
    if options.large:
        large()


if __name__ == "__main__":
    main()
