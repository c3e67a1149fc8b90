import subprocess
import sys


def specgrad(*words, **settings):
    return subprocess.run([sys.executable, "-m", "specgrad", *map(str, words)], capture_output=True, text=True, **settings)


def test_the_commands_are_these():
    done = specgrad("--help")
    assert done.returncode == 0
    for command in ("demo", "figures", "figure"):
        assert command in done.stdout


def test_every_option_of_the_demo_has_a_help_text():
    done = specgrad("demo", "--help")
    options = ("--out", "--text", "--size", "--mlp", "--positions", "--steps", "--batch-size", "--adamw-lr", "--muon-lr",
               "--weight-decay", "--probe-every", "--device", "--dtype", "--seed", "--tune", "--resume")  # fmt: skip
    for option in options:
        assert option in done.stdout, option
    assert done.stdout.count("(default:") == len(options)


def test_figures_are_listed_with_their_claims():
    done = specgrad("figures")
    assert done.returncode == 0
    assert "polar-error\n  Every polar method keeps" in done.stdout


def test_a_figure_is_drawn_checked_and_found_again(tmp_path):
    for _ in range(2):
        done = specgrad("figure", "polar-error", "--out", tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("PASS") == 8
    assert (tmp_path / "polar-error.pdf").exists()
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_figure_whose_check_fails_exits_with_1(tmp_path):
    script = (
        "import sys; from specgrad.figures import polar_error; from specgrad.figures._figure import Check;"
        "polar_error.check = lambda table: [Check('a', 'b', 'c', 'd', False)];"
        f"sys.argv = ['specgrad', 'figure', 'polar-error', '--out', {str(tmp_path)!r}];"
        "from specgrad.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "FAIL" in done.stdout


def test_an_unknown_figure_fails_with_one_line_and_a_suggestion(tmp_path):
    done = specgrad("figure", "polar-eror", "--out", tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Did you mean 'polar-error'" in done.stderr
