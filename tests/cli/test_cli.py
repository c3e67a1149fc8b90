import os
import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import specgrad as package
from specgrad.cli.cite import citations
from specgrad.figures._figure import figure_names, load_figure

HERE = Path(__file__).parent


def specgrad(*words, **settings):
    return subprocess.run([sys.executable, "-m", "specgrad", *map(str, words)], capture_output=True, text=True, **settings)


def lines_of(error):
    return [line for line in error.splitlines() if line.strip()]


def test_the_commands_are_these():
    done = specgrad("--help")
    assert done.returncode == 0
    assert "{demo,probe,figures,figure,reproduce,sweep,status,doctor,cite}" in done.stdout


def test_the_version_is_printed():
    assert specgrad("--version").stdout == f"specgrad {package.__version__}\n"


def test_every_option_of_the_demo_has_a_help_text():
    done = specgrad("demo", "--help")
    options = ("--out", "--text", "--size", "--mlp", "--positions", "--steps", "--batch-size", "--adamw-lr",
               "--muon-lr", "--weight-decay", "--probe-every", "--device", "--dtype", "--seed", "--tune", "--track",
               "--resume")  # fmt: skip
    for option in options:
        assert option in done.stdout, option
    assert done.stdout.count("(default:") == len(options)


def test_every_setting_of_a_figure_is_an_option_with_help_and_what_the_presets_say():
    done = specgrad("figure", "polar-error", "--help")
    text = " ".join(done.stdout.replace("│", " ").split())
    assert "--rows" in text
    assert "number of rows. (quick: 128; paper: 384, 768)" in text
    assert "--preset" in text
    assert "--rows" not in specgrad("figure", "--help").stdout


def test_figures_are_listed_with_claims_and_states(tmp_path):
    done = specgrad("figures", "--store", tmp_path / "none")
    assert done.returncode == 0
    assert "polar-error\n  Every polar method keeps" in done.stdout
    assert "quick: 1 run" in done.stdout
    assert not (tmp_path / "none").exists()


def test_reading_only_the_beginning_of_the_output_is_no_error():
    command = f"{sys.executable} -m specgrad figures | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert "Error" not in done.stderr
    assert lines_of(done.stdout) == [figure_names()[0]]


def test_a_figure_is_drawn_checked_and_found_again(tmp_path):
    for _ in range(2):
        done = specgrad("figure", "polar-error", "--out", tmp_path, "--rows", 32, "--cols", 32)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("PASS") == 8
    assert "finished earlier" in done.stderr
    assert {p.suffix for p in tmp_path.glob("polar-error.*")} == {".pdf", ".svg", ".png", ".csv", ".tex"}
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert "1 done, 0 missing" not in specgrad("figures", "--store", tmp_path / "runs").stdout  # the preset has other rows


def outside(*words, tmp_path):
    return specgrad(*words, "--module", "outside_figure", cwd=tmp_path)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "outside_figure.py").write_text((HERE / "outside_figure.py").read_text())
    return tmp_path


def test_a_figure_from_elsewhere_is_done_like_any_other(folder):
    done = outside("figure", "--number", 7, tmp_path=folder)
    assert done.returncode == 0, done.stderr
    assert "PASS  halves: expected half (tolerance none), got [3.5, 3.5]" in done.stdout
    assert pl.read_csv(folder / "specgrad-figures" / "outside-figure.csv")["half"].to_list() == [3.5, 3.5]
    assert "--number" in outside("figure", "--help", tmp_path=folder).stdout


def test_a_figure_whose_check_fails_exits_with_1(folder):
    done = outside("figure", "--expected", 8, tmp_path=folder)
    assert done.returncode == 1
    assert "FAIL  halves" in done.stdout


def test_sweep_status_and_retry_tell_what_failed_and_why(folder):
    words = ("--store", "s", "--number", 13)
    for _ in range(2):
        done = outside("sweep", *words, tmp_path=folder)
        assert done.returncode == 1
        assert "outside-figure: 0 done, 0 missing, 1 failed" in done.stdout
        assert "ArithmeticError: thirteen" in done.stdout
    assert "failed earlier and is not tried again" in done.stderr
    assert "failed earlier" not in outside("sweep", *words, "--retry-failed", tmp_path=folder).stderr
    done = outside("figure", *words, tmp_path=folder)
    assert done.returncode == 1
    assert "not drawn" in done.stdout
    done = outside("sweep", "--store", "s", "--preset", "paper", "--shard", "2/3", tmp_path=folder)
    assert done.returncode == 0
    assert "3 done, 0 missing" in done.stdout
    done = outside("status", "--store", "s", "--preset", "paper", tmp_path=folder)
    assert done.returncode == 0
    assert "outside-figure (paper): 3 done, 6 missing" in done.stdout
    assert re.search(r"done    halves number=4, \d", done.stdout)


def test_status_of_a_failed_run_says_why_and_exits_with_1(folder):
    (folder / "outside_figure.py").write_text(
        (folder / "outside_figure.py").read_text().replace("Config(5.0)", "Config(13.0)")
    )
    assert outside("sweep", "--store", "s", tmp_path=folder).returncode == 1
    done = outside("status", "--store", "s", tmp_path=folder)
    assert done.returncode == 1
    assert "failed  halves number=13: ArithmeticError: thirteen" in done.stdout


def test_the_gallery_shows_claim_picture_checks_settings_and_time(folder):
    done = outside("reproduce", tmp_path=folder)
    assert done.returncode == 0, done.stderr
    page = (folder / "specgrad-figures" / "index.html").read_text()
    for text in ("Halves are half.", "<svg", "PASS", "nobody2020", "<dt>steps</dt>", "one after the other"):
        assert text in page
    assert not re.search(r"""(src|href)=["']https?:""", page)


@pytest.mark.parametrize(
    "words, message",
    [
        (["figure", "polar-eror"], "got 'polar-eror'. Did you mean 'polar-error'?"),
        (["sweep", "gpt-optimisers"], "Did you mean 'gpt-optimizers'?"),
        (["reproduce", "polar"], "`figure` must be one of"),
        (["cite", "polar-eror"], "Did you mean 'polar-error'?"),
        (["figure"], "`name` or `--module` must say which figure"),
        (["figure", "--module", "no_such_module"], "`module` must be importable from here; got 'no_such_module'"),
        (["figure", "--module", "json"], "`module` must be a figure; 'json' lacks PAPER, FIGURE"),
        (["figure", "polar-error", "--rows", "0"], "`rows` must be >= 1; got 0"),
        (["figure", "polar-error", "--workers", "0"], "`workers` must be >= 1; got 0"),
        (["figure", "polar-error", "--threads", "0"], "`threads` must be >= 1; got 0"),
        (["figure", "polar-error", "--track", "x"], "`track` must be jsonl:FOLDER"),
        (["sweep", "polar-error", "--shard", "3/2"], "`shard` must be i/n"),
        (["status", "--store", "nowhere"], "`store` must be a folder with stored runs; got 'nowhere'"),
        (["status", "polar-error", "--preset", "slow", "--store", "."], "`preset` must be one of quick, paper; got 'slow'"),
        (["doctor", "--device", "warp"], "`device` must be available here; got 'warp'"),
    ],
)
def test_mistakes_are_answered_in_one_line(tmp_path, words, message):
    done = specgrad(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(lines_of(done.stderr)) == 1


def test_misspelt_options_are_answered_with_the_nearest(tmp_path):
    done = specgrad("figure", "polar-error", "--rws", "3", cwd=tmp_path)
    assert done.returncode == 2
    assert "--rows" in done.stderr


def test_the_doctor_finds_the_kernels_exact():
    done = specgrad("doctor", env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout
    assert "FAIL" not in done.stdout
    assert done.stdout.count("ok  ") >= 10
    assert package.__version__ in done.stdout


def test_citations_are_bibtex_of_what_a_figure_uses():
    done = specgrad("cite", "polar-error")
    keys = re.findall(r"^@\w+\{([^,]+),$", done.stdout, flags=re.MULTILINE)
    assert keys[0] == "davis2025"
    assert keys[-1] == "specgrad"
    for entry in citations().values():
        assert entry.count("{") == entry.count("}")
        for field in ("title", "author", "year"):
            assert f"  {field} = " in entry


@pytest.mark.parametrize("name", figure_names())
def test_every_figure_cites_what_there_is(name):
    figure = load_figure(name)
    assert {figure.PAPER, *getattr(figure, "CITES", ())} <= set(citations())


MODEL = """
import torch

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.arange(64) % 3)
    return model, torch.utils.data.DataLoader(data, batch_size=16), torch.nn.CrossEntropyLoss()
"""


def test_a_users_model_is_probed_from_the_command_line(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    done = specgrad("probe", "mine:build", "--steps", 6, "--every", 5, "--track", "jsonl:log", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The condition holds on" in done.stdout
    assert "Report: specgrad-probe/report.html" in done.stdout
    assert {p.name for p in (tmp_path / "specgrad-probe").iterdir()} == {"report.html", "probe.csv", "probe.jsonl"}
    assert len((tmp_path / "log" / "probe-mine.build.jsonl").read_text().splitlines()) >= 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "needs either a target package.module:callable or --hf"),
        (("no_such_module:build",), "`target` must name something that can be imported; got 'no_such_module:build'"),
        (("--hf", "gpt2"), "without --random-init"),
        (("mine:build", "--every", 0), "`every` must be >= 1; got 0"),
        (("mine:build", "--track", "nowhere"), "`track` must be jsonl:FOLDER"),
    ],
)
def test_a_probe_that_cannot_work_says_so_in_one_line(words, message, tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    done = specgrad("probe", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert len(lines_of(done.stderr)) == 1
    assert message in done.stderr
