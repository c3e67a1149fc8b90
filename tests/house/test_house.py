"""The architecture of docs/house.md, read from the code."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import specgrad

SOURCE = Path(specgrad.__file__).parent
LABS = {"aim", "gpt", "memory"}
CORE = {"linalg", "optim", "probe", "pages"}

# What each room may import, beside itself.
ALLOWED = {
    "linalg": set(),
    "optim": {"linalg"},
    "probe": {"linalg", "optim", "pages"},
    "runs": set(),
    "data": set(),
    "plots": set(),
    "pages": set(),
    "stats": set(),
    **{lab: {"linalg", "optim", "probe", "runs", "data", "plots", "stats"} for lab in LABS},
    "figures": {"linalg", "optim", "probe", "runs", "data", "plots", "pages", "stats"} | LABS,
    "report": {"linalg", "optim", "probe", "runs", "data", "plots", "pages", "stats", "figures"} | LABS,
    "__main__": {"cli"},
    "cli": {"linalg", "optim", "probe", "runs", "data", "plots", "pages", "stats", "figures", "report"} | LABS,
}


def room_of(path):
    part = path.relative_to(SOURCE).parts[0]
    return part.removesuffix(".py")


def files():
    return [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("specgrad."):
                yield name.split(".")[1]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    room = room_of(path)
    assert set(imported_rooms(path)) - {room} <= ALLOWED[room]


def test_every_room_has_its_place_in_the_order():
    assert {room_of(path) for path in files()} == set(ALLOWED)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_are_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= 400


def public_objects():
    for info in pkgutil.walk_packages(specgrad.__path__, "specgrad."):
        module = importlib.import_module(info.name)
        yield info.name, module
        for name, value in vars(module).items():
            if not name.startswith("_") and getattr(value, "__module__", None) == info.name:
                if inspect.isfunction(value):
                    yield f"{info.name}.{name}", value
                elif inspect.isclass(value):
                    yield f"{info.name}.{name}", value
                    for member, method in vars(value).items():
                        if not member.startswith("_") and inspect.isfunction(method):
                            yield f"{info.name}.{name}.{member}", method


def test_every_public_name_is_documented():
    missing = [name for name, value in public_objects() if not inspect.getdoc(value)]
    assert missing == []


def test_every_exported_name_exists():
    for info in pkgutil.walk_packages(specgrad.__path__, "specgrad."):
        module = importlib.import_module(info.name)
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), f"{info.name}.{name}"


def test_import_works_with_the_core_dependencies_alone():
    script = """
import sys
class Only:
    blocked = {"polars", "matplotlib", "tyro", "rich", "jinja2", "markupsafe", "threadpoolctl"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.blocked:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Only())
import specgrad, torch
model = torch.nn.Linear(4, 3)
optimizer = specgrad.optim.Muon(specgrad.optim.param_groups(model))
with specgrad.Probe(model, every=1) as probe:
    model(torch.ones(5, 4)).sum().backward()
    probe.step()
optimizer.step()
print(probe.report().summary())
task = specgrad.gpt.Task(size="tiny", batch_size=2)
specgrad.gpt.simulate(task, specgrad.gpt.Recipe("adamw", 0.01, steps=1))
print(len(specgrad.data.shakespeare().content))
try:
    specgrad.runs.Store
except ModuleNotFoundError as error:
    assert "specgrad[lab]" in str(error)
from specgrad.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "The condition holds on" in done.stdout
    assert "5052271" in done.stdout, done.stderr
    assert done.returncode == 1
    assert "pip install 'specgrad[lab]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_labs_are_not_imported_before_they_are_used():
    script = "import sys, specgrad; print([m for m in sys.modules if m.startswith('specgrad.gpt')]); specgrad.gpt.Task"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_the_same_everywhere():
    root = SOURCE.parents[1]
    for file in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        assert re.search(rf"\b{re.escape(specgrad.__version__)}\b", (root / file).read_text()), file
