"""Where a result comes from: code, versions, machine."""

import ast
import datetime
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("specgrad", "torch", "numpy", "scipy", "polars", "matplotlib")


@cache
def code_version(*modules: str) -> str:
    """Hash of what the given modules and packages compute.

    Syntax trees are hashed without docstrings, so that comments, layout and documentation may change while stored runs
    stay valid.

    Args:
        modules: dotted names, such as ``specgrad.linalg``.
    """
    digest = hashlib.sha256()
    for name in sorted(modules):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ValueError(f"`modules` of `code_version` must be importable; got {name!r}.")
        origin = Path(spec.origin)
        for file in sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else [origin]:
            digest.update(f"{name}:{file.name}\n".encode() + _meaning(file.read_text(encoding="utf-8")).encode())
    return digest.hexdigest()[:16]


def _meaning(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            node.body = body[1:]  # type: ignore[attr-defined,index]
    return ast.dump(tree)


def provenance(device: torch.device | str = "cpu", dtype: torch.dtype | str | None = None) -> dict[str, Any]:
    """Versions, git state, host, device, threads and time, as JSON-ready values; ``dtype`` as it is told."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "versions": versions | {"python": platform.python_version()},
        "git": _git_state(),
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else str(device),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _git_state() -> str | None:
    """Commit of the checkout that this file lies in, with ``-dirty``; None for an installed package."""
    here = Path(__file__).resolve()
    if "site-packages" in here.parts:
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(here.parent), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
