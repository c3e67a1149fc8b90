"""Progress of many runs: one live line per running one and a total on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from specgrad.runs.watch import OnStep

# Without a terminal, a run of unknown length says where it is this often.
_SECONDS_BETWEEN_LINES = 10.0


class RunProgress:
    """Says which runs are under way, how far each is, and how long the rest will take.

    The time left is that of the runs not yet finished at the mean pace of those of this session, so it counts every run
    alike.

    Args:
        num_runs: runs that are to be done.
        console: where to write; standard error by default.
    """

    def __init__(self, num_runs: int, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._num_runs, self._ended = num_runs, 0
        self._began = time.perf_counter()
        # Finished share of each run under way, and the share it had when it was first heard of (a resumed run).
        self._shares: dict[str, float] = {}
        self._head_start = 0.0
        self._bars: Progress | None = None
        self._tasks: dict[str, object] = {}
        if self._console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}", table_column=Column(max_width=56, no_wrap=True)),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[count]}"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._total = self._bars.add_task("all runs", total=num_runs, count=f"0/{num_runs}", note="")

    def __enter__(self) -> "RunProgress":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, line: str) -> None:
        """Writes a line, above the bars if there are any."""
        self._console.print(line, markup=False)

    def start(self, label: str, steps: int | None = None) -> OnStep:
        """Announces a run; returns its callback ``(finished steps, value)``.

        Args:
            label: name of the run, different from those under way.
            steps: number of steps it will take, if that is known.
        """
        self._shares[label] = 0.0
        if self._bars is not None:
            self._tasks[label] = self._bars.add_task(label, total=steps, count="", note="")
        last, heard = time.perf_counter(), False

        def on_step(done: int, value: float) -> None:
            nonlocal last, heard
            if steps:
                share = min(1.0, done / steps)
                if not heard:
                    self._head_start += max(0.0, (done - 1) / steps)
                self._shares[label] = share
            heard = True
            count = f"{done}/{steps}" if steps else f"{done}"
            if self._bars is not None:
                self._bars.update(self._tasks[label], completed=done, count=count, note=f"{value:.4g}")  # type: ignore[arg-type]
                self._show_total()
                return
            now = time.perf_counter()
            tenth = steps is not None and (done % max(1, steps // 10) == 0 or done == steps)
            if tenth or (steps is None and now - last > _SECONDS_BETWEEN_LINES):
                last = now
                self.say(f"{label}: step {count} ({value:.4g}), {self.left()} left in all")

        return on_step

    def end(self, label: str, outcome: str) -> None:
        """Says how a run ended; it need not have been announced by `start`, as where it is done by another machine."""
        self._shares.pop(label, None)
        self._ended += 1
        if self._bars is not None:
            if label in self._tasks:
                self._bars.remove_task(self._tasks.pop(label))  # type: ignore[arg-type]
            self._show_total()
        self.say(f"{label}: {outcome} ({self._ended}/{self._num_runs})")

    def left(self) -> str:
        """Time that the unfinished runs will take, in words; ``?`` before anything is known."""
        done = self._ended + sum(self._shares.values())
        elapsed = time.perf_counter() - self._began
        if done <= self._head_start or elapsed <= 0:
            return "?"
        pace = (done - self._head_start) / elapsed
        seconds = max(0, round((self._num_runs - done) / pace))
        hours, minutes = seconds // 3600, seconds // 60 % 60
        return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds % 60:02d} s"

    def _show_total(self) -> None:
        assert self._bars is not None
        done = self._ended + sum(self._shares.values())
        count = f"{self._ended}/{self._num_runs}"
        self._bars.update(self._total, completed=done, count=count, note=f"{self.left()} left")
