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
    """A short name for each run's key: the experiment and the settings that differ among the runs."""
    columns = {run.key: settings_columns({"experiment": run.experiment} | run.config, run.seed) for run in runs}
    names = dict.fromkeys(name for settings in columns.values() for name in settings)
    differ = [n for n in names if n != "experiment" and len({repr(s.get(n)) for s in columns.values()}) > 1]
    return {
        key: " ".join([str(s["experiment"]), *(f"{n}={_short(s[n])}" for n in differ if n in s)])[:72]
        for key, s in columns.items()
    }


def _short(value: str | int | float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
