"""From measurements to routing: which hidden matrix gets the spectral update."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from specgrad.optim.blocks import Blocks
from specgrad.optim.groups import ParamGroups, param_groups


@dataclass(frozen=True)
class Evidence:
    """What is known on one parameter.

    Attributes:
        advantage: geometric mean over its blocks of the last predicted advantage; NaN where none was measured.
        verdicts: the last verdicts of the condition over its blocks.
    """

    advantage: float
    verdicts: tuple[str, ...]

    @classmethod
    def of(
        cls, parameters: Collection[str], records: Sequence[dict[str, Any]], advantages: Sequence[dict[str, Any]]
    ) -> "Evidence":
        """Evidence from the last measurement of each level."""
        last = _last(advantages, parameters)
        logs = [math.log(row["advantage"]) for row in last if row["advantage"] > 0 and not row["reason"]]
        verdicts = [row["verdict"] for row in _last(records, parameters)]
        return cls(math.exp(sum(logs) / len(logs)) if logs else math.nan, tuple(verdicts))

    def favours_spectral(self, now: bool, threshold: float = 1.0, hysteresis: float = 1.1) -> bool:
        """Whether the parameter should take spectral steps.

        Level 2 decides where it was measured: the advantage must exceed ``threshold`` times ``hysteresis`` to enter and
        fall below ``threshold / hysteresis`` to leave. Without it the condition is a veto: a block where it fails leaves,
        and nothing enters on its account.

        Args:
            now: whether it takes them at present.
            threshold: least advantage, > 0.
            hysteresis: factor on either side, >= 1.
        """
        if math.isfinite(self.advantage):
            return self.advantage > (threshold / hysteresis if now else threshold * hysteresis)
        return now and "fails" not in self.verdicts

    def reason(self) -> str:
        """The evidence in words."""
        if math.isfinite(self.advantage):
            return f"predicted advantage {self.advantage:.2f}"
        return "condition " + ", ".join(sorted(set(self.verdicts))) if self.verdicts else "not measured"


def _last(rows: Sequence[dict[str, Any]], parameters: Collection[str]) -> list[dict[str, Any]]:
    """The rows on some parameters of the last step that has any, found from the end."""
    found: list[dict[str, Any]] = []
    for row in reversed(rows):
        if found and row["step"] != found[0]["step"]:
            break
        if row["parameter"] in parameters:
            found.append(row)
    return found


def routed_groups(
    model: nn.Module,
    records: Sequence[dict[str, Any]],
    advantages: Sequence[dict[str, Any]],
    threshold: float,
    overrides: Mapping[str, str] | None,
    blocks: Mapping[str, Blocks] | None,
) -> ParamGroups:
    """Groups of `specgrad.optim.param_groups`, with AdamW where the measurements speak against the spectral update."""
    base = param_groups(model, overrides, blocks)
    overruled: dict[str, str] = {}
    for route in base.routes:
        evidence = Evidence.of({route.name}, records, advantages)
        judged = route.update == "spectral" and not route.reason.startswith(("override", "declared"))
        if judged and not evidence.favours_spectral(True, threshold, 1.0):
            overruled[route.name] = evidence.reason()
    if not overruled:
        return base
    names = "|".join(name.replace(".", r"\.") for name in overruled)
    # Patterns are tried in order: the user's own come first.
    chosen = dict(overrides or {}) | {f"^(?:{names})$": "adamw"}
    groups = param_groups(model, chosen, blocks)
    routes = [
        type(r)(r.name, r.shape, r.update, overruled[r.name], r.blocks) if r.name in overruled else r for r in groups.routes
    ]
    return ParamGroups(list(groups), routes)
