"""`sweep`: do what is missing, anywhere, and say where every run stands."""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

from specgrad.runs.execute import Outcome, Settings, execute, last_line
from specgrad.runs.interrupt import StopRequest
from specgrad.runs.pool import work_in_pool
from specgrad.runs.progress import RunProgress
from specgrad.runs.provenance import provenance
from specgrad.runs.run import Run, labels
from specgrad.runs.store import Store
from specgrad.runs.tracking import check_tracker

# How often jobs of an executor are asked whether they are done.
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Status:
    """Where one run stands in a store.

    Attributes:
        run: the run.
        label: its short name: experiment and the settings in which the runs differ.
        outcome: state, and why.
        seconds: wall time of a finished run.
    """

    run: Run
    label: str
    outcome: Outcome
    seconds: float | None = None


def status(runs: Sequence[Run], store: Store) -> list[Status]:
    """Where runs stand: done, missing or failed, each key once, in the order given."""
    unique = list({run.key: run for run in runs}.values())
    names = labels(unique)
    return [Status(run, names[run.key], *_standing(run, store)) for run in unique]


def _standing(run: Run, store: Store) -> tuple[Outcome, float | None]:
    if run in store:
        return Outcome("done"), store.about(run)["provenance"].get("wall_seconds")
    trace = store.failure(run)
    if trace is not None:
        return Outcome("failed", last_line(trace)), None
    return Outcome("missing", "has a checkpoint" if store.checkpoint(run).exists() else ""), None


def sweep(
    runs: Sequence[Run],
    store: Store,
    executor: Any = None,
    shard: str | None = None,
    *,
    threads: int | None = 1,
    retry_failed: bool = False,
    track: str | None = None,
    label: Callable[[Run], str] | None = None,
    show_progress: bool = True,
) -> list[Status]:
    """Does the runs that are not in the store.

    Results do not depend on executor, number of workers or order: a run draws from streams of its own and has the same
    number of threads everywhere. A failing run is recorded with its traceback and does not stop the others. Ctrl-C or
    SIGTERM lets measurements that can keep their state, and loses nothing finished.

    Args:
        runs: what should be in the store in the end; those with equal keys are done once.
        store: where finished runs lie; for other machines, on a file system they share.
        executor: None for one run after the other in this process; a number of local worker processes (a script that asks
            for them needs ``if __name__ == "__main__":``); or an object with ``submit``, such as Dask's ``Client``,
            submitit's ``AutoExecutor`` or anything of ``concurrent.futures``.
        shard: ``"i/n"`` does the i-th of n equal parts, i from 1 to n. Processes that are given different parts of the same
            list need not know of each other.
        threads: threads of PyTorch and BLAS per run; None leaves them as they are.
        retry_failed: do runs again that failed earlier.
        track: where records go as they come, see `specgrad.runs.tracker`.
        label: names runs in progress messages.
        show_progress: write progress to standard error.

    Returns:
        Where each run of the shard stands.

    Raises:
        ValueError: for a shard, number of workers, threads or tracker that cannot be.
    """
    chosen = _part(list({run.key: run for run in runs}.values()), shard)
    workless = [run.key for run in chosen if run.work is None]
    if workless:
        raise ValueError(f"`runs` must know their `work`; got {workless[0]} without.")
    if isinstance(executor, int) and executor < 1:
        raise ValueError(f"`executor` must be None, a number of workers >= 1, or have `submit`; got {executor}.")
    if threads is not None and threads < 1:
        raise ValueError(f"`threads` must be >= 1; got {threads}.")
    if track is not None:
        check_tracker(track)
    before = status(chosen, store)
    todo = [s.run for s in before if s.outcome.state != "done" and (retry_failed or s.outcome.state != "failed")]
    names = {run.key: label(run) if label else s.label for run, s in zip(chosen, before, strict=True)}
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        progress = stack.enter_context(RunProgress(len(todo))) if show_progress else None
        if progress is not None:
            _say_what_is_there(before, names, retry_failed, progress)
        reporter = _Reporter(progress, names)
        settings = Settings(Store(store.path.resolve()), threads, track)
        if executor is None:
            _one_by_one(todo, settings, stop, reporter)
        elif isinstance(executor, int):
            work_in_pool(todo, settings, executor, stop, reporter.start, reporter.end)
        else:
            _elsewhere(todo, settings, executor, stop, reporter)
    return status(chosen, store)


class _Reporter:
    """Passes beginnings, steps and ends of runs on to the progress display, if there is one."""

    def __init__(self, progress: RunProgress | None, names: dict[str, str]) -> None:
        self._progress, self._names = progress, names
        self._began: dict[str, float] = {}

    def submit(self, run: Run) -> None:
        self._began[run.key] = time.perf_counter()

    def start(self, run: Run) -> Callable[[int, float], None]:
        self.submit(run)
        if self._progress is None:
            return lambda done, value: None
        steps = run.config.get("steps")
        return self._progress.start(self._names[run.key], steps if isinstance(steps, int) else None)

    def end(self, run: Run, outcome: Outcome) -> None:
        if self._progress is not None:
            seconds = time.perf_counter() - self._began[run.key]
            self._progress.end(self._names[run.key], f"{outcome}, {seconds:.1f} s")


def _say_what_is_there(before: list[Status], names: dict[str, str], retry_failed: bool, progress: RunProgress) -> None:
    for one in before:
        if one.outcome.state == "done":
            progress.say(f"{names[one.run.key]}: finished earlier")
        elif one.outcome.state == "failed" and not retry_failed:
            progress.say(f"{names[one.run.key]}: failed earlier and is not tried again: {one.outcome.why}")


def _part(runs: list[Run], shard: str | None) -> list[Run]:
    if shard is None:
        return runs
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"`shard` must be i/n with 1 <= i <= n, such as 7/64; got {shard!r}.")
    return runs[int(match[1]) - 1 :: int(match[2])]


def _one_by_one(todo: list[Run], settings: Settings, stop: StopRequest, reporter: _Reporter) -> None:
    for run in todo:
        if stop():
            return
        reporter.end(run, execute(run, settings, reporter.start(run), stop))


def _elsewhere(todo: list[Run], settings: Settings, executor: Any, stop: StopRequest, reporter: _Reporter) -> None:
    """Submits all runs and asks until each is done; a job that was lost is a failed run."""
    if hasattr(executor, "get_executor"):
        # Dask's client would answer a call that it has seen from memory, and its own futures cannot be asked politely.
        executor = executor.get_executor(pure=False)
    jobs = {}
    # submitit turns what is submitted inside its batch into one job array.
    with executor.batch() if hasattr(executor, "batch") else nullcontext():
        for run in todo:
            reporter.submit(run)
            jobs[run.key] = (run, executor.submit(execute, run, settings))
    while jobs and not stop():
        for key, (run, job) in list(jobs.items()):
            if job.done():
                del jobs[key]
                reporter.end(run, _outcome_of(run, job, settings))
        time.sleep(_POLL_SECONDS)
    for _, job in jobs.values():
        job.cancel()


def _outcome_of(run: Run, job: Any, settings: Settings) -> Outcome:
    try:
        outcome = job.result()
    except Exception as error:  # of the executor, not of the measurement: a lost worker, a job killed by its cluster
        why = f"{type(error).__name__}: {error}"
        settings.store.write_failure(run, why, provenance())
        return Outcome("failed", last_line(why))
    assert isinstance(outcome, Outcome)
    return outcome
