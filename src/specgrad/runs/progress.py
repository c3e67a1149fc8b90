"""Progress of several runs: live bars with an estimate on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class RunProgress:
    """Counts steps over all runs and says how long the rest will take.

    Args:
        total_steps: steps of all runs that are to be done.
        console: where to write; standard error by default.
    """

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr, highlight=False)
        self._total = total_steps
        self._finished = 0
        self._began = time.perf_counter()
        self._first: int | None = None
        self._bars: Progress | None = None
        if self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description:<30}"), BarColumn(bar_width=24), MofNCompleteColumn(),
                TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
                console=self._console,
            )  # fmt: skip
            self._overall = self._bars.add_task("all runs", total=total_steps, note="")

    def __enter__(self) -> "RunProgress":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, line: str) -> None:
        """Writes a line above the bars."""
        self._console.print(line)

    def watch(self, label: str, steps: int) -> Callable[[int, float], None]:
        """A callback ``(finished steps, loss)`` for a run of ``steps`` steps; a resumed run starts where it stopped."""
        before = self._finished
        self._finished += steps
        every = max(1, steps // 10)
        task = self._bars.add_task(label, total=steps, note="") if self._bars is not None else None

        def on_step(done: int, loss: float) -> None:
            if self._first is None:
                self._first = before + done - 1
            if self._bars is not None and task is not None:
                self._bars.update(task, completed=done, note=f"loss {loss:.3f}")
                self._bars.update(self._overall, completed=before + done)
            elif done % every == 0 or done == steps:
                self.say(f"{label}: step {done}/{steps}, loss {loss:.3f}, {self._left(before + done)} left in all")

        return on_step

    def skip(self, steps: int) -> None:
        """Counts steps of a run that was found finished."""
        self._finished += steps

    def _left(self, done: int) -> str:
        elapsed = time.perf_counter() - self._began
        rate = (done - (self._first or 0)) / elapsed
        seconds = round((self._total - done) / rate) if rate > 0 else 0
        return f"{seconds // 60} min {seconds % 60:02d} s"
