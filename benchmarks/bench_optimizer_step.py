"""Whole optimizer steps against torch.optim.Muon: CPU time, interleaved rounds, medians of ratios, one process.

Run ``python benchmarks/bench_optimizer_step.py [--threads 1] [--rounds 7] [--widths]``. The set is the hidden matrices of
four layers of width 384: 16 of 384x384, 4 of 1536x384, 4 of 384x1536. The limit is the time that the FLOPs of a method
would take at the rate of a float32 product measured in the same process.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from specgrad.linalg.polar import ZOLOTAREV, polar_factor
from specgrad.optim import Muon


def shapes_of(width: int) -> list[tuple[int, int]]:
    return [(width, width)] * 16 + [(4 * width, width)] * 4 + [(width, 4 * width)] * 4


def stepper(optimizer_class: type, shapes: list[tuple[int, int]], **settings: object) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)
    return optimizer_class(weights, lr=0.02, **settings).step


def cpu_seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def product_rate() -> float:
    """Float32 FLOPs per CPU second of a 768 x 768 product."""
    matrix = torch.randn(768, 768)
    best = min(cpu_seconds(lambda: matrix @ matrix) for _ in range(10))
    return 2 * 768**3 / best


def rational_flops(shapes: list[tuple[int, int]], mode: str) -> float:
    """Symmetric product, r factorisations with inverses, symmetric product: the least that the rational method needs."""
    poles, _ = ZOLOTAREV[mode]
    total = 0.0
    for shape in shapes:
        m, n = sorted(shape)
        total += m * m * n + poles * m**3 + 2 * m * m * n
    return total


def compare(shapes: list[tuple[int, int]], rivals: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for step in rivals.values():
        step()
    for _ in range(rounds):
        for name, step in rivals.items():
            times[name].append(cpu_seconds(step))
    return times


def report(title: str, shapes: list[tuple[int, int]], rounds: int, modes: list[str]) -> None:
    rivals: dict[str, Callable[[], object]] = {"torch.optim.Muon": stepper(torch.optim.Muon, shapes)}
    for mode in modes:
        for backend in ("torch", "scipy") if mode != "exact" else ("torch",):
            function = lambda stack, mode=mode, backend=backend: polar_factor(stack, mode=mode, backend=backend)  # noqa: E731
            rivals[f"{mode}, {backend}"] = stepper(Muon, shapes, orthogonalizer=function)
    rivals["default"] = stepper(Muon, shapes)
    times = compare(shapes, rivals, rounds)
    base = times["torch.optim.Muon"]
    rate = product_rate()
    print(f"{title}: torch.optim.Muon {1e3 * statistics.median(base):.1f} ms, product rate {rate / 1e9:.0f} GFLOP/s")
    for name, seconds in times.items():
        ratios = [s / b for s, b in zip(seconds, base, strict=True)]
        limit = ""
        if name.split(",")[0] in ZOLOTAREV:
            limit = f", {statistics.median(seconds) * rate / rational_flops(shapes, name.split(',')[0]):.1f} x FLOP limit"
        print(f"  {name:<20} {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]{limit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--widths", action="store_true", help="widths 64 to 1536 as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report("width 384", shapes_of(384), options.rounds, ["fast", "robust", "exact", "strict"])
    for count, side in ((400, 32), (200, 64)):
        report(f"{count} of {side}x{side}", [(side, side)] * count, options.rounds, ["fast"])
    if options.widths:
        for width in (64, 128, 256, 512, 768, 1024, 1536):
            report(f"width {width}", shapes_of(width)[::4], max(3, options.rounds // 2), ["fast", "robust"])


if __name__ == "__main__":
    main()
