"""Local worker processes, each told its next run over a pipe of its own.

A pipe per worker says exactly which run was under way when a worker died (killed for memory, say), and has no lock that a
killed process could keep.
"""

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from specgrad.runs.execute import Outcome, Settings, execute
from specgrad.runs.provenance import provenance
from specgrad.runs.run import Run
from specgrad.runs.threads import thread_limit
from specgrad.runs.watch import OnStep

# A worker reports steps no more often than this.
_SECONDS_BETWEEN_REPORTS = 0.1

_READY = "ready"


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    ready: bool = False
    run: Run | None = None
    on_step: OnStep | None = None


def work_in_pool(
    runs: Sequence[Run],
    settings: Settings,
    workers: int,
    should_stop: Callable[[], bool],
    on_start: Callable[[Run], OnStep],
    on_end: Callable[[Run, Outcome], None],
) -> None:
    """Does runs in ``workers`` fresh processes; returns when all have ended, or soon after ``should_stop``.

    A worker that dies fails its run and is replaced.

    Raises:
        RuntimeError: if workers cannot even begin.
    """
    waiting = list(reversed(runs))
    pool: list[_Worker] = []
    told = False
    try:
        # Children read the number of threads from the environment when they load their libraries.
        with thread_limit(settings.threads):
            pool = [_hire(settings) for _ in range(min(workers, len(waiting)))]
            while True:
                if should_stop() and not told:
                    told = True
                    for worker in pool:
                        _tell(worker, "stop")
                for worker in pool:
                    if worker.ready and worker.run is None and waiting and not told:
                        worker.run = waiting.pop()
                        worker.on_step = on_start(worker.run)
                        _tell(worker, worker.run)
                busy = {worker.connection: worker for worker in pool if worker.run is not None or not worker.ready}
                if not busy:
                    return
                for connection in wait(list(busy), timeout=0.2):
                    worker = busy[connection]  # type: ignore[index]
                    if not _listen(worker, settings, on_end):
                        pool.remove(worker)
                        if waiting and not told:
                            pool.append(_hire(settings))
    finally:
        for worker in pool:
            worker.connection.close()
            # Idle workers leave at the end of their pipe; a busy one is only here after an exception.
            if worker.run is not None or not worker.ready:
                worker.process.kill()
            worker.process.join()


def _hire(settings: Settings) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, settings))
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _tell(worker: _Worker, message: object) -> None:
    # A dead worker is noticed when it is listened to.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        worker.connection.send(message)


def _listen(worker: _Worker, settings: Settings, on_end: Callable[[Run, Outcome], None]) -> bool:
    """Takes one message; False if the worker is dead."""
    try:
        message = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        code = worker.process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        if worker.run is None:
            raise RuntimeError(
                f"a worker process ended with {how} before it could begin; a script that asks for workers must do so under "
                '`if __name__ == "__main__":`.'
            ) from None
        why = f"the worker process died with {how}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
        settings.store.write_failure(worker.run, why, provenance())
        run, worker.run = worker.run, None
        on_end(run, Outcome("failed", why))
        return False
    if message == _READY:
        worker.ready = True
    elif isinstance(message, Outcome):
        assert worker.run is not None
        run, worker.run = worker.run, None
        on_end(run, message)
    elif worker.on_step is not None:
        worker.on_step(*message)
    return True


def _serve(connection: Connection, settings: Settings) -> None:
    """A worker's life: runs come and outcomes go until the pipe ends."""
    stopped = False

    def on_signal(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True

    # Ctrl-C reaches every process of a terminal; the parent decides. SIGTERM may reach a worker alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, on_signal)

    def should_stop() -> bool:
        nonlocal stopped
        if not stopped and connection.poll():
            # While a run is under way the parent only ever says stop, or is gone.
            with contextlib.suppress(EOFError, ConnectionResetError):
                connection.recv()
            stopped = True
        return stopped

    connection.send(_READY)
    while not stopped:
        try:
            message = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        if not isinstance(message, Run):
            return
        last = 0.0

        def on_step(done: int, value: float, run: Run = message) -> None:
            nonlocal last
            now = time.perf_counter()
            if now - last > _SECONDS_BETWEEN_REPORTS or done == run.config.get("steps"):
                last = now
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.send((done, float(value)))

        outcome = execute(message, settings, on_step, should_stop)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.send(outcome)
