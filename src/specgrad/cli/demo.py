"""``specgrad demo``."""

import shlex
import sys

from specgrad.figures._collect import RunsMissing
from specgrad.report.demo import DemoOptions, run_demo, saved_options


def do_demo(options: DemoOptions, resume: bool) -> int:
    """Does the main job, or continues it, and prints what came out."""
    if resume:
        if options != DemoOptions(out=options.out):
            raise ValueError(
                "`--resume` continues with the settings of the interrupted demo; give no other option but `--out`."
            )
        options = saved_options(options.out)
    try:
        result = run_demo(options)
    except RunsMissing as stop:
        out = "" if options.out == DemoOptions().out else f" --out {shlex.quote(str(options.out))}"
        print(f"Interrupted: {stop}. Continue with: specgrad demo --resume{out}", file=sys.stderr)
        return 130
    print(*result.checks, sep="\n")
    for outcome in result.outcomes:
        print(f"{outcome.label:<28} validation loss {outcome.val_loss:.4f}  training {outcome.seconds:.0f} s")
    print(f"Report: {result.path}")
    return 0
