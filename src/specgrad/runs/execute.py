"""One run, wherever it is done: limited threads, a record of what came out, be it a failure."""

import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

from specgrad.runs.interrupt import Interrupted, StopRequest
from specgrad.runs.provenance import provenance
from specgrad.runs.run import Run
from specgrad.runs.store import Store
from specgrad.runs.threads import thread_limit
from specgrad.runs.tracking import tracker
from specgrad.runs.watch import OnStep, Watch


@dataclass(frozen=True)
class Outcome:
    """How a run ended, or where it stands.

    Attributes:
        state: ``done``; ``failed``; ``missing`` (not begun, or interrupted).
        why: last line of the traceback of a failed run; how far a missing one has come.
    """

    state: Literal["done", "missing", "failed"]
    why: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.why}" if self.why else self.state


@dataclass(frozen=True)
class Settings:
    """How runs are done; nothing of it is part of a result, except the last bits that ``threads`` may change.

    Attributes:
        store: where finished runs lie.
        threads: threads per run; None leaves them as they are.
        track: spec of `specgrad.runs.tracker`, or None.
    """

    store: Store
    threads: int | None = 1
    track: str | None = None


def execute(
    run: Run, settings: Settings, on_step: OnStep | None = None, should_stop: Callable[[], bool] | None = None
) -> Outcome:
    """Does a run and stores what came out; a run that is in the store by now is left alone.

    Exceptions of the measurement are stored and returned, not raised. SIGTERM, by which a cluster announces the end of a
    job, asks the measurement to keep its state.
    """
    store = settings.store
    if run in store:
        return Outcome("done")
    assert run.work is not None
    began = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(thread_limit(settings.threads))
        about = provenance(run.config.get("device", "cpu"), run.config.get("dtype"))
        stop = should_stop or stack.enter_context(StopRequest())
        watch = Watch(on_step, stop, store.checkpoint(run))
        try:
            if settings.track is not None:
                watch = replace(watch, on_record=stack.enter_context(tracker(settings.track, run.key, run.config)))
            records = run.work(watch)
            store.write(run, records, about | {"wall_seconds": time.perf_counter() - began})
        except Interrupted as stopped:
            return Outcome("missing", f"interrupted at step {stopped.step}")
        except Exception as error:
            store.write_failure(run, traceback.format_exc(), about | {"wall_seconds": time.perf_counter() - began})
            return Outcome("failed", last_line(f"{type(error).__name__}: {error}"))
    return Outcome("done")


def last_line(trace: str) -> str:
    """What a traceback says in the end: its last line with the exception's name and message."""
    lines = [line for line in trace.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
