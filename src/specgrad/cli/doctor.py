"""``specgrad doctor``: what is here, what was measured, and whether the kernels are as exact as they should be."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from specgrad.linalg import choose_method, polar_factor
from specgrad.linalg.backend import bfloat16_pays
from specgrad.runs import provenance, stream

# Shape and condition number of the self-test; singular values are spaced evenly in logarithms.
_SHAPE = (96, 160)
_EXPONENT = 2

# Largest relative error of each mode on this matrix, about twice the usual one.
_BOUNDS = {"fast": 0.2, "robust": 0.06, "exact": 2e-5, "strict": 2e-6}


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis; ``passed`` is None for a plain fact."""

    name: str
    value: str
    passed: bool | None = None

    def __str__(self) -> str:
        outcome = {None: "    ", True: "ok  ", False: "FAIL"}[self.passed]
        return f"{outcome}  {self.name:<28} {self.value}"


def do_doctor(device: str) -> int:
    """Prints the findings; exit status 1 if one of the tests failed.

    Raises:
        ValueError: if the device is not available.
    """
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"`device` must be available here; got {device!r} ({str(error).splitlines()[0]}).") from error
    failed = False
    for finding in findings(torch.device(device)):
        print(finding, flush=True)
        failed |= finding.passed is False
    return int(failed)


def findings(device: torch.device) -> Iterator[Finding]:
    """Versions, machine, calibration, then tests of precision and reproducibility."""
    about = provenance(device)
    for name, version in about["versions"].items():
        yield Finding(name, version or "not installed")
    for name in ("processor", "cores", "threads", "system", "device", "git"):
        yield Finding(name, str(about[name]))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        yield Finding(f"product rate, {str(dtype)[6:]}", f"{_product_rate(dtype, device) / 1e9:,.0f} GFLOP/s")
    yield Finding("bfloat16 pays", "yes" if bfloat16_pays(device) else "no: Newton-Schulz works in float32 here")
    for shape in ((512, 512), (64, 32, 32)):
        choice = choose_method(torch.empty(shape, device=device))
        yield Finding(f"auto for {'x'.join(map(str, shape))}", str(choice))
    yield from _precision(device)


def _product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a product of matrices of side 512, the best of a few."""
    side = 512 if dtype != torch.bfloat16 or device.type != "cpu" else 192
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        best = min(best, time.perf_counter() - began)
    return 2 * side**3 / best


def _precision(device: torch.device) -> Iterator[Finding]:
    rows, cols = _SHAPE
    u, _ = torch.linalg.qr(torch.randn(rows, rows, generator=stream(0, "left"), dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(cols, rows, generator=stream(0, "right"), dtype=torch.float64))
    exact = u @ v.mT
    matrix = ((u * torch.logspace(0, -_EXPONENT, rows, dtype=torch.float64)) @ v.mT).float().to(device)
    product = torch.linalg.norm((matrix @ matrix.mT).cpu().double() - matrix.cpu().double() @ matrix.cpu().double().mT)
    error = (product / torch.linalg.norm(matrix.cpu().double() @ matrix.cpu().double().mT)).item()
    # TF32, where it is switched on, has an error of about 3e-4.
    yield Finding("float32 products", f"relative error {error:.1e}, at most 1e-05", error <= 1e-5)
    for mode, bound in _BOUNDS.items():
        got = polar_factor(matrix, mode=mode)  # type: ignore[arg-type]
        error = (torch.linalg.norm(got.cpu().double() - exact) / torch.linalg.norm(exact)).item()
        yield Finding(f"polar factor, {mode}", f"relative error {error:.1e}, at most {bound:.0e}", error <= bound)
        again = polar_factor(matrix, mode=mode)  # type: ignore[arg-type]
        yield Finding(f"polar factor, {mode}, repeated", "bit for bit the same", torch.equal(got, again))
    tiny = polar_factor(matrix * 1e-30, mode="fast")
    error = (torch.linalg.norm(tiny.cpu().double() - exact) / torch.linalg.norm(exact)).item()
    yield Finding(
        "polar factor of 1e-30 G", f"relative error {error:.1e}, at most {_BOUNDS['fast']:.0e}", error <= _BOUNDS["fast"]
    )
