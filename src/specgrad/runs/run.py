"""`Run`: one experiment under one configuration and seed, addressed by what determines its result."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """What is run; two runs with equal keys have equal results.

    Attributes:
        experiment: name of the experiment, which begins the file name.
        config: JSON-ready settings.
        seed: the one seed of the run.
        code: version of the code that the result depends on, see `specgrad.runs.code_version`.
    """

    experiment: str
    config: dict[str, Any]
    seed: int
    code: str

    @property
    def key(self) -> str:
        """``experiment-`` and the first 16 digits of the hash of (experiment, config, seed, code)."""
        content = json.dumps([self.experiment, self.config, self.seed, self.code], sort_keys=True)
        return f"{self.experiment}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
