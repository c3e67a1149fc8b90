"""`Run`: one experiment under one configuration and seed, addressed by what determines its result."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specgrad.runs.watch import Watch

Work = Callable[[Watch], list[dict[str, Any]]]


@dataclass(frozen=True)
class Run:
    """What is run; two runs with equal keys have equal results.

    Attributes:
        experiment: name of the experiment, which begins the file name.
        config: JSON-ready settings.
        seed: the one seed of the run.
        code: version of the code that the result depends on, see `specgrad.runs.code_version`.
        work: does the run and returns its records; picklable, so that it can be sent to a worker. Not part of the key.

    Raises:
        ValueError: if ``config`` is not JSON-ready, or ``experiment`` cannot begin a file name.
    """

    experiment: str
    config: dict[str, Any]
    seed: int
    code: str
    work: Work | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.experiment or set(self.experiment) & set("/\\\0"):
            raise ValueError(f"`experiment` of `Run` must be able to begin a file name; got {self.experiment!r}.")
        try:
            json.dumps(self.config)
        except TypeError as error:
            raise ValueError(f"`config` of `Run` must be JSON-ready ({error}); got {self.config!r}.") from error

    @property
    def key(self) -> str:
        """``experiment-`` and the first 16 digits of the hash of (experiment, config, seed, code)."""
        content = json.dumps([self.experiment, self.config, self.seed, self.code], sort_keys=True)
        return f"{self.experiment}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"

    @property
    def about(self) -> dict[str, Any]:
        """Everything that the key stands for, JSON-ready."""
        return {"experiment": self.experiment, "config": self.config, "seed": self.seed, "code": self.code}


def settings_columns(config: dict[str, Any], seed: int) -> dict[str, str | int | float]:
    """Scalar settings and the seed: what a run adds as columns to its table."""
    return {k: v for k, v in config.items() if isinstance(v, str | int | float)} | {"seed": seed}


def labels(runs: list[Run]) -> dict[str, str]:
    """A short name for each run's key: the experiment and the settings in which its runs differ."""
    names: dict[str, str] = {}
    for experiment in dict.fromkeys(run.experiment for run in runs):
        columns = {r.key: settings_columns(r.config, r.seed) for r in runs if r.experiment == experiment}
        settings = dict.fromkeys(name for of_run in columns.values() for name in of_run)
        differ = [n for n in settings if len({repr(of_run.get(n)) for of_run in columns.values()}) > 1]
        for key, of_run in columns.items():
            names[key] = " ".join([experiment, *(f"{n}={_short(of_run[n])}" for n in differ if n in of_run)])[:72]
    # Runs may differ in settings that are not scalar, or beyond the end of a long name.
    unclear = {name for name in names.values() if list(names.values()).count(name) > 1}
    return {key: f"{name} ({key[-6:]})" if name in unclear else name for key, name in names.items()}


def _short(value: str | int | float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
