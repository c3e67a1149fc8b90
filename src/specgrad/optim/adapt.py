"""Adaptive routing: parameters move between the spectral update and AdamW as measurements say, with hysteresis."""

from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Opinion(Protocol):
    """What a measurement says on one parameter."""

    def favours_spectral(self, now: bool, threshold: float = 1.0, hysteresis: float = 1.1) -> bool:
        """Whether the parameter should take spectral steps, given whether it does now."""


@runtime_checkable
class Adviser(Protocol):
    """Whoever measures: `specgrad.Probe` is one."""

    def evidence(self, parameter: Tensor) -> Opinion | None:
        """What is known on a parameter; None for nothing."""


def with_twins(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to every spectral group an empty AdamW group that takes its parameters when they leave.

    The groups exist from the start, so that schedulers, which count groups once, serve them all.
    """
    out = []
    for group in groups:
        out.append(group)
        if group.get("update", "spectral") == "spectral":
            members = group["params"] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
            kept = {k: v for k, v in group.items() if k == "weight_decay"}
            if "param_names" in group or (members and isinstance(members[0], tuple)):
                kept["param_names"] = []
            out.append(kept | {"params": [], "update": "adamw", "adaptive": len(out) - 1})
    return out


def decide(
    groups: list[dict[str, Any]], adviser: Adviser, threshold: float, hysteresis: float
) -> list[tuple[Tensor, dict[str, Any], dict[str, Any]]]:
    """Moves that the evidence asks for: parameter, group it leaves, group it enters."""
    moves = []
    for twin in groups:
        if "adaptive" not in twin:
            continue
        spectral = groups[twin["adaptive"]]
        for here, there, now in ((spectral, twin, True), (twin, spectral, False)):
            for parameter in here["params"]:
                opinion = adviser.evidence(parameter)
                if opinion is not None and opinion.favours_spectral(now, threshold, hysteresis) != now:
                    moves.append((parameter, here, there))
    return moves


def move(parameter: Tensor, here: dict[str, Any], there: dict[str, Any]) -> None:
    """Takes a parameter, and its name where groups carry names, from one group to the other."""
    at = next(i for i, p in enumerate(here["params"]) if p is parameter)
    there["params"].append(here["params"].pop(at))
    if "param_names" in here:
        there.setdefault("param_names", []).append(here["param_names"].pop(at))


def carried_state(old: dict[str, Any], fresh: dict[str, Tensor]) -> dict[str, Tensor]:
    """State under the new update: the running gradient is kept for a spectral step, AdamW starts anew.

    A spectral direction ignores scale, so that AdamW's first moment serves it; AdamW's bias correction counts from its
    first step and would blow up a momentum that is not zero.
    """
    if "momentum_buffer" in fresh and "exp_avg" in old:
        return {"momentum_buffer": old["exp_avg"].to(fresh["momentum_buffer"].dtype)}
    return fresh


def arranged_like(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Moves parameters between a spectral group and its twin as they were when a checkpoint was saved.

    Raises:
        ValueError: if groups carry no names, by which alone a move can be repeated.
    """
    for twin, kept in zip(groups, saved, strict=False):
        if "adaptive" not in twin or len(kept["params"]) == len(twin["params"]):
            continue
        spectral = groups[twin["adaptive"]]
        if "param_names" not in kept or "param_names" not in spectral:
            raise ValueError(
                "`state_dict` of an adaptive optimizer must carry parameter names where parameters have moved; build the "
                "groups with `specgrad.optim.param_groups` or named parameters."
            )
        for names, here, there in (
            (set(kept["param_names"]), spectral, twin),
            (set(saved[twin["adaptive"]]["param_names"]), twin, spectral),
        ):
            for name in [n for n in here.get("param_names", []) if n in names]:
                move(here["params"][here["param_names"].index(name)], here, there)
        for group, other in ((spectral, saved[twin["adaptive"]]), (twin, kept)):
            order = {name: i for i, name in enumerate(other["param_names"])}
            pairs = sorted(zip(group["param_names"], group["params"], strict=True), key=lambda pair: order[pair[0]])
            group["param_names"], group["params"] = [n for n, _ in pairs], [p for _, p in pairs]


def check_knows(groups: list[dict[str, Any]], adviser: Any) -> None:
    """Refuses an adviser that says, by a method ``knows``, that it watches none of the spectral parameters."""
    spectral = [p for group in groups if group.get("update") == "spectral" for p in group["params"]]
    if spectral and hasattr(adviser, "knows") and not any(map(adviser.knows, spectral)):
        raise ValueError(
            f"`adapt` must watch the model of these parameters; it knows none of the {len(spectral)} spectral ones."
        )


def check_settings(adviser: Any, every: int, threshold: float, hysteresis: float) -> None:
    """Refuses settings out of range, by name and value."""
    if not isinstance(adviser, Adviser):
        raise TypeError(f"`adapt` must be a probe, or have its method `evidence`; got {type(adviser).__name__}.")
    if every < 1:
        raise ValueError(f"`adapt_every` must be >= 1; got {every}.")
    if not (threshold > 0 and hysteresis >= 1):
        raise ValueError(f"`threshold` must be > 0 and `hysteresis` >= 1; got {threshold} and {hysteresis}.")
