import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import specgrad

README = Path(__file__).parents[2] / "README.md"
MODULES = [info.name for info in pkgutil.walk_packages(specgrad.__path__, "specgrad.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_print_what_they_say(name):
    failed, _ = doctest.testmod(importlib.import_module(name), verbose=False)
    assert failed == 0


def test_the_examples_of_the_readme_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    printed = capsys.readouterr().out
    assert "hidden matrix of a Linear" in printed
    assert "The condition holds on" in printed
    assert "gd 8\nmuon 137\nnewton 138\n" in printed
    assert (tmp_path / "probe.csv").exists()
    assert (tmp_path / "attention.pdf").stat().st_size > 1000


def test_the_experiment_of_the_guide_runs_as_a_script(tmp_path):
    guide = (README.parent / "docs" / "experiments.md").read_text()
    first, second = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    (tmp_path / "my_experiment.py").write_text(first + textwrap.indent(second, "    "))
    done = subprocess.run([sys.executable, "my_experiment.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 10
    assert "PASS  nuclear rank of noise: expected 1 " in done.stdout


def test_commands_and_targets_named_in_the_readme_exist():
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README.read_text(), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for link in re.findall(r"\]\(([^)]+)\)", README.read_text()):
        assert (README.parent / link).exists(), link
