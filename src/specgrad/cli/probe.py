"""``specgrad probe``."""

import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from specgrad.report.probe_run import ProbeOptions, run_probe
from specgrad.runs.tracking import tracker


@dataclass(frozen=True)
class Arguments(ProbeOptions):
    """Settings of ``specgrad probe`` with the target as a word of its own."""

    target: Annotated[
        Positional[str | None], arg(help="package.module:callable that returns (model, loader, loss_fn).", metavar="TARGET")
    ] = None


def do_probe(options: ProbeOptions, track: str | None) -> int:
    """Trains a model under the probe, and prints what came out."""
    name = (options.target or options.hf or "").replace(":", ".")
    with (
        tracker(track, f"probe-{name}", {k: str(v) for k, v in asdict(options).items()}) if track else nullcontext() as seen
    ):
        found = run_probe(options, seen)
    print(found.report.summary())
    print(f"Report: {found.path}")
    if found.interrupted:
        print(f"specgrad: interrupted after {len(found.losses)} steps, which the report covers.", file=sys.stderr)
        return 130
    return 0
