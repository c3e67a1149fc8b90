import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from specgrad.report.demo import DemoOptions, run_demo
from specgrad.report.demo_page import command_line

SMALL = ["--size", "tiny", "--batch-size", "4", "--steps", "12", "--probe-every", "4"]


def specgrad(*words, **settings):
    return subprocess.run([sys.executable, "-m", "specgrad", *map(str, words)], capture_output=True, text=True, **settings)


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    done = specgrad("demo", *SMALL, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done


def test_the_demo_writes_report_tables_and_figures_and_says_where(demo):
    out, done = demo
    assert f"Report: {out / 'report.html'}" in done.stdout
    assert {p.name for p in (out / "tables").iterdir()} == {
        "summary.csv", "layers.csv", "losses.csv", "measurements.csv", "checks.csv",
    }  # fmt: skip
    for stem in ("losses", "condition"):
        assert {p.suffix for p in (out / "figures").glob(f"{stem}.*")} == {".pdf", ".svg", ".png", ".csv", ".tex"}
    assert len(list((out / "runs").iterdir())) == 3


def test_without_a_terminal_progress_is_plain_lines_with_the_time_left(demo):
    _, done = demo
    assert "AdamW everywhere: step 12/12" in done.stderr
    assert "left in all" in done.stderr
    assert "\x1b" not in done.stderr


def test_the_expected_order_is_checked_and_shown_whatever_came_out(demo):
    out, done = demo
    checks = pl.read_csv(out / "tables" / "checks.csv")
    assert checks.height == 5
    for name, passed in checks.select("name", "passed").iter_rows():
        assert f"{'PASS' if passed else 'FAIL'}  {name}" in done.stdout


def test_tables_agree_with_each_other(demo):
    out, _ = demo
    summary = pl.read_csv(out / "tables" / "summary.csv")
    assert summary["update"].to_list() == ["adamw", "muon-out", "muon"]
    gains = summary["val_loss"][0] - summary["val_loss"]
    assert summary["gain"].to_list() == pytest.approx(gains.to_list())
    layers = pl.read_csv(out / "tables" / "layers.csv")
    measurements = pl.read_csv(out / "tables" / "measurements.csv")
    last = measurements.filter(pl.col("step") == 11).select("update", "layer", "ratio", "verdict")
    assert layers.select("update", "layer", "ratio", "verdict").equals(last)
    assert set(measurements["step"]) == {0, 4, 8, 11}
    favoured = layers.filter(pl.col("layer").is_in(["embedding", "head"]))["favoured"]
    assert set(favoured) == {"AdamW"}


def test_a_second_run_finds_the_finished_parts(demo):
    out, _ = demo
    before = {p: p.stat().st_mtime_ns for p in (out / "runs").iterdir()}
    done = specgrad("demo", *SMALL, "--out", out)
    assert done.returncode == 0
    assert done.stderr.count("finished earlier") == 3
    assert {p: p.stat().st_mtime_ns for p in (out / "runs").iterdir()} == before


def test_ctrl_c_keeps_what_is_done_and_resume_ends_with_the_same_losses(demo, tmp_path):
    expected, _ = demo
    out = tmp_path / "out"
    words = [sys.executable, "-m", "specgrad", "demo", *SMALL, "--out", str(out)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("Muon on MLP outputs: step 3/12"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stderr.read()
    assert process.wait() == 130
    assert "Continue with: specgrad demo --resume" in rest
    kinds = sorted(p.suffix for p in (out / "runs").iterdir())
    assert kinds == [".parquet", ".pt"]
    done = specgrad("demo", "--resume", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "AdamW everywhere: finished earlier" in done.stderr
    assert "Muon on MLP outputs: step 1/12" not in done.stderr
    columns = ["update", "val_loss", "val_stderr", "gain"]
    got, wanted = (pl.read_csv(folder / "tables" / "summary.csv").select(columns) for folder in (out, expected))
    assert got.equals(wanted)


def test_kill_9_loses_nothing_that_was_finished(tmp_path):
    out = tmp_path / "out"
    words = [sys.executable, "-m", "specgrad", "demo", *SMALL, "--out", str(out)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("Muon on MLP outputs: step 1/12"):
            process.kill()
            break
    process.wait()
    assert len(list((out / "runs").glob("*.parquet"))) == 1
    done = specgrad("demo", "--resume", "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("finished earlier") == 1


def test_tune_repeats_the_sweep_and_uses_what_it_finds(tmp_path):
    options = DemoOptions(out=tmp_path, size="tiny", batch_size=2, steps=2, probe_every=2, tune=True)
    result = run_demo(options)
    sweep = pl.read_csv(tmp_path / "tuning.csv")
    for outcome in result.outcomes:
        rows = sweep.filter(pl.col("update") == outcome.update)
        best = rows.sort("val_loss")[0]
        assert outcome.adamw_lr == best["adamw_lr"][0]
        assert rows.height >= 3


def test_an_own_text_is_used_and_named(tmp_path):
    text = tmp_path / "own.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    options = DemoOptions(out=tmp_path / "out", text=text, size="tiny", batch_size=2, steps=2, probe_every=2)
    result = run_demo(options)
    assert "own.txt" in result.path.read_text()


def test_records_of_the_demo_are_tracked_as_they_come(tmp_path):
    track = f"jsonl:{tmp_path / 'track'}"
    run_demo(DemoOptions(out=tmp_path, size="tiny", batch_size=2, steps=2, probe_every=2, track=track))
    files = sorted((tmp_path / "track").iterdir())
    assert [f.stem for f in files] == sorted(f.stem for f in (tmp_path / "runs").iterdir())
    for file in files:
        assert {json.loads(line)["step"] for line in file.read_text().splitlines()} == {0, 1, 2}


def test_resume_works_in_the_folder_it_is_given_wherever_it_was_moved(demo, tmp_path):
    moved = tmp_path / "a b"
    shutil.copytree(demo[0], moved)
    (moved / "report.html").unlink()
    done = specgrad("demo", "--resume", "--out", "a b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("finished earlier") == 3
    assert (moved / "report.html").exists()


@pytest.mark.parametrize("content", ["{bad", "{}", "[]", '{"unknown": 1, "text": null}'])
def test_damaged_settings_are_named_in_one_line(tmp_path, content):
    (tmp_path / "demo.json").write_text(content)
    done = specgrad("demo", "--resume", "--out", tmp_path)
    assert done.returncode == 2
    assert "demo.json must hold the settings" in done.stderr
    assert len(lines_of(done.stderr)) == 1


def lines_of(error):
    return [line for line in error.splitlines() if line.strip()]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--text", "no-such-file.txt"], "`text` must be a readable text file; got 'no-such-file.txt' (no such file)"),
        (["--text", "{empty}"], "`text` must not be empty"),
        (["--text", "{short}"], "bytes; got 5"),
        (["--size", "gigantic"], "`size` of `gpt.Task` must be one of tiny, small, medium, large; got 'gigantic'"),
        (["--out", "{short}"], "`path` of `Store` must be a writable folder"),
        (["--muon-lr", "0"], "`muon_lr` must be a finite learning rate > 0; got 0.0"),
        (["--adamw-lr", "-0.1"], "`adamw_lr` must be a finite learning rate > 0; got -0.1"),
        (["--steps", "0"], "`steps` must be >= 1; got 0"),
        (["--batch-size", "0"], "`batch_size`"),
        (["--probe-every", "0"], "`probe_every` must be >= 1; got 0"),
        (["--device", "warp"], "`device` must be available here; got 'warp'"),
        (["--dtype", "int8"], "`dtype` must be one of float32, float64, bfloat16; got 'int8'"),
        (["--track", "paper"], "`track` must be jsonl:FOLDER"),
        (["--resume", "--out", "{nothing}"], "which has no demo.json"),
        (["--resume", "--steps", "7"], "give no other option but `--out`"),
    ],
)
def test_bad_input_fails_before_training_with_one_clear_line(tmp_path, words, message):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("brief")
    names = {"empty": tmp_path / "empty.txt", "short": tmp_path / "short.txt", "nothing": tmp_path / "nothing"}
    words = [word.format(**names) for word in words]
    done = specgrad("demo", *(["--out", str(tmp_path / "out")] if "--out" not in words else []), *words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(lines_of(done.stderr)) == 1
    assert not (tmp_path / "out" / "report.html").exists()


def test_misspelt_options_are_answered_with_the_nearest(tmp_path):
    done = specgrad("demo", "--stps", "3", cwd=tmp_path)
    assert done.returncode == 2
    assert "--steps" in done.stderr


def test_the_command_in_the_report_repeats_the_run(demo):
    out, _ = demo
    options = DemoOptions(out=out, size="tiny", batch_size=4, steps=12, probe_every=4)
    words = command_line(options).split()
    assert words[:2] == ["specgrad", "demo"]
    assert set(SMALL) <= set(words)
    assert command_line(options) in (out / "report.html").read_text()


def test_saved_settings_are_json(demo):
    out, _ = demo
    assert json.loads((out / "demo.json").read_text())["steps"] == 12


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        if os.environ.get("CI"):
            pytest.fail("the continuous integration must have chromium")
        pytest.skip("needs chromium on the PATH")
    from playwright.sync_api import sync_playwright

    flags = [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def page_at(browser, demo):
    pages = []

    def open_page(width):
        page = browser.new_page(viewport={"width": width, "height": 900}, offline=True)
        page.problems = []
        page.on("console", lambda message: page.problems.append(message.text))
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on(
            "request",
            lambda request: page.problems.append(request.url) if not request.url.startswith(("file:", "data:")) else None,
        )
        page.goto((demo[0] / "report.html").as_uri())
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()


@pytest.mark.parametrize("width", [400, 1400])
def test_the_report_opens_offline_without_console_messages_and_fits_the_window(page_at, width):
    page = page_at(width)
    assert page.problems == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Nothing but what scrolls inside its own box may stick out.
    outside = page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll") && !e.closest("svg")
             && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + e.className)"""
    )
    assert outside == []


@pytest.mark.parametrize("width", [400, 1400])
def test_text_in_the_drawings_stays_readable(page_at, width):
    page = page_at(width)
    heights = page.evaluate("[...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect().height)")
    assert len(heights) > 40
    assert min(heights) >= 8.5


def test_columns_sort_by_number_and_by_name_in_both_directions(page_at):
    page = page_at(1400)
    table = page.locator("table.sortable").last

    def column(index):
        return table.locator(f"tbody tr td:nth-child({index})").all_inner_texts()

    heads = table.locator("th button").all_inner_texts()
    ratio = heads.index("ratio") + 1
    button = table.locator("th button", has_text="ratio")
    button.click()
    values = [float(text) for text in column(ratio)]
    assert values == sorted(values)
    assert table.locator("th[aria-sort=ascending]").inner_text() == "ratio"
    button.click()
    assert [float(text) for text in column(ratio)] == sorted(values, reverse=True)
    table.locator("th button", has_text="layer").click()
    assert column(1) == sorted(column(1))
    assert page.problems == []


def test_the_report_prints_on_paper_with_every_detail_open(page_at, tmp_path):
    page = page_at(1400)
    page.emulate_media(media="print")
    page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0


def test_the_page_refers_to_nothing_outside_itself(demo):
    html = (demo[0] / "report.html").read_text()
    for attribute in ("src=", '<link rel="stylesheet', "@import", "url(http"):
        assert attribute not in html
    assert time.strftime("%Y") in html
    assert Path(demo[0] / "report.html").stat().st_size < 2_000_000
