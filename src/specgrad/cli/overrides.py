"""Every field of a figure's configuration as an option of the command line."""

import dataclasses
import itertools
import typing
from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any

import docstring_parser
import tyro

from specgrad.figures._figure import figure_names, load_figure, load_outside_figure

_WITH_SETTINGS = ("figure", "sweep")


def figure_of(name: str, module: str | None) -> ModuleType:
    """The figure that a command names, inside the package or by ``--module``.

    Raises:
        ValueError: for none, both, an unknown or an incomplete one.
    """
    if (module is None) == (name == ""):
        raise ValueError(f"`name` or `--module` must say which figure; got {name!r} and {module!r}.")
    return load_figure(name) if module is None else load_outside_figure(module)


def overrides_type(words: Sequence[str]) -> type:
    """Dataclass of the settings of the figure that command-line words name: one optional field for each; else empty."""
    if not words or words[0] not in _WITH_SETTINGS:
        return _settings_of(None)
    for before, word in itertools.pairwise(words):
        if before == "--module":
            return _settings_of(load_outside_figure(word))
    for word in words:
        if word.startswith("--module="):
            return _settings_of(load_outside_figure(word.partition("=")[2]))
    # A word that does not begin with a dash right after the command is meant as a name, so a typo is answered at once.
    named = [word for word in words[1:] if word in figure_names()] or [w for w in words[1:2] if not w.startswith("-")]
    return _settings_of(load_figure(named[0]) if named else None)


def _settings_of(figure: ModuleType | None) -> type:
    if figure is None:
        return dataclasses.make_dataclass("Settings", [])
    config = figure.Config
    hints = typing.get_type_hints(config)
    documented = {p.arg_name: p.description or "" for p in docstring_parser.parse(config.__doc__ or "").params}
    fields: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(config):
        hint = _in_presets(figure, field.name)
        described = tyro.conf.arg(help=documented.get(field.name, ""), help_behavior_hint=hint)
        fields.append((field.name, Annotated[hints[field.name] | None, described], None))
    return dataclasses.make_dataclass("Settings", fields)


def _in_presets(figure: ModuleType, name: str) -> str:
    """What the presets say of a setting, such as ``(quick: 64, 128; paper: 512)``."""
    said = {}
    for preset, configs in figure.PRESETS.items():
        values = list(dict.fromkeys(str(getattr(config, name)) for config in configs))
        said[preset] = ", ".join(values[:4]) + (", ..." if len(values) > 4 else "")
    if len(set(said.values())) == 1:
        return f"(presets: {next(iter(said.values()))})"
    return "(" + "; ".join(f"{preset}: {values}" for preset, values in said.items()) + ")"


def configs_of(figure: ModuleType, preset: str, settings: Any = None) -> list[Any]:
    """Configurations of a preset, with the given settings put in; equal ones count once.

    Raises:
        ValueError: for an unknown preset or a setting out of range.
    """
    if preset not in figure.PRESETS:
        raise ValueError(f"`preset` must be one of {', '.join(figure.PRESETS)}; got {preset!r}.")
    given = {} if settings is None else {k: v for k, v in dataclasses.asdict(settings).items() if v is not None}
    return list(dict.fromkeys(dataclasses.replace(config, **given) for config in figure.PRESETS[preset]))
