import io
import subprocess
import sys

from rich.console import Console

from specgrad.runs.progress import RunProgress


def test_progress_without_a_terminal_is_plain_lines_with_the_time_left():
    script = (
        "from specgrad.runs.progress import RunProgress\n"
        "with RunProgress(2) as progress:\n"
        "    for name in ('first', 'second'):\n"
        "        on_step = progress.start(name, 10)\n"
        "        for step in range(10): on_step(step + 1, 0.5)\n"
        "        progress.end(name, 'done')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert len(lines) == 22
    assert lines[0].startswith("first: step 1/10 (0.5), ")
    assert lines[-2:] == ["second: step 10/10 (0.5), 0 min 00 s left in all", "second: done (2/2)"]


def test_progress_on_a_terminal_is_one_line_per_run_under_way_and_a_total():
    console = Console(force_terminal=True, width=120, record=True, file=io.StringIO())
    with RunProgress(3, console) as progress:
        first, second = progress.start("first", 4), progress.start("second")
        first(2, 0.25)
        second(7, 0.5)
        progress.end("second", "failed: reason")
        progress._bars.refresh()
    shown = console.export_text()
    assert "second: failed: reason (1/3)" in shown
    last = shown[shown.index("(1/3)") :]
    assert "all runs" in last
    assert "1/3" in last
    assert "first" in last
    assert "2/4" in last
    assert "second" not in last.rstrip().splitlines()[-1]


def test_the_time_left_counts_runs_alike_and_not_what_an_earlier_session_did(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    progress = RunProgress(4, Console(file=io.StringIO()))
    assert progress.left() == "?"
    on_step = progress.start("resumed", 10)
    clock[0] = 10.0
    on_step(6, 1.0)  # five of these steps are from before
    # A tenth of a run in 10 s, 3.4 runs left.
    assert progress.left() == "5 min 40 s"
    progress.end("resumed", "done")
    clock[0] = 3600.0
    # Half a run in an hour, three left.
    assert progress.left() == "6 h 00 min"
