"""Routing: which parameter of a model gets which update, and why."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

UPDATES = ("spectral", "adamw")

# Names that output heads go by where neither weight tying nor a matching embedding gives them away.
_HEAD_NAME = re.compile(r"(^|\.)(lm_head|head|unembed|unembedding|classifier|logits)$")


@dataclass(frozen=True)
class Route:
    """Where one parameter goes.

    Attributes:
        name: the parameter's first name in ``model.named_parameters()``.
        shape: its shape.
        update: ``spectral``, ``adamw`` or ``frozen``.
        reason: why, in words.
    """

    name: str
    shape: tuple[int, ...]
    update: str
    reason: str


class ParamGroups(list[dict[str, Any]]):
    """Groups for a spectral optimizer; ``str()`` is the routing report, ``routes`` the same as data."""

    def __init__(self, groups: list[dict[str, Any]], routes: list[Route]) -> None:
        super().__init__(groups)
        self.routes = routes

    def __str__(self) -> str:
        rows = [("parameter", "shape", "update", "reason")]
        rows += [(r.name, "x".join(map(str, r.shape)) or "scalar", r.update, r.reason) for r in self.routes]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]) for row in rows)


def param_groups(model: nn.Module, overrides: dict[str, str] | None = None) -> ParamGroups:
    """Groups of a model's parameters: hidden matrices spectral, everything else AdamW.

    Spectral: weights of ``nn.Linear``. AdamW: embeddings, output heads (tied to an embedding, last with as many outputs as
    an embedding has rows, or named like a head), norms, biases and whatever else is not the weight of a linear layer.
    Frozen parameters are reported and left out; shared ones are reported once.

    Args:
        model: any module.
        overrides: regular expression -> ``spectral`` or ``adamw``; a parameter takes the first pattern found in its
            name (``re.search``).

    Returns:
        A list of one group per update, ready for `specgrad.optim.Muon`; ``print`` it to see every route.

    Raises:
        ValueError: if the model has no trainable parameter, an override names an unknown update, matches no parameter,
            or asks for a spectral update of a parameter that is not a matrix.

    Example:
        >>> print(param_groups(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, bias=False))))
        parameter  shape  update    reason
        0.weight   3x4    spectral  hidden matrix of a Linear
        0.bias     3      adamw     bias of a Linear
        2.weight   2x3    spectral  hidden matrix of a Linear
    """
    overrides = overrides or {}
    for pattern, update in overrides.items():
        if update not in UPDATES:
            raise ValueError(f"`overrides` of `param_groups` must map to one of {', '.join(UPDATES)}; got {update!r}.")
        if not any(re.search(pattern, name) for name, _ in model.named_parameters()):
            raise ValueError(f"`overrides` of `param_groups` has the pattern {pattern!r}, which matches no parameter.")
    routes: list[Route] = []
    members: dict[str, list[tuple[str, nn.Parameter]]] = {update: [] for update in UPDATES}
    for name, parameter, update, reason in _routed(model):
        for pattern, wanted in overrides.items():
            if update != "frozen" and re.search(pattern, name):
                update, reason = wanted, f"override {pattern!r}"
                break
        if update == "spectral" and parameter.ndim != 2:
            raise ValueError(
                f"`overrides` of `param_groups` asks for a spectral update of {name}, which must be a matrix; "
                f"got shape {tuple(parameter.shape)}."
            )
        routes.append(Route(name, tuple(parameter.shape), update, reason))
        if update != "frozen":
            members[update].append((name, parameter))
    if not any(members.values()):
        raise ValueError("`model` of `param_groups` must have at least one trainable parameter; got none.")
    return ParamGroups([{"params": named, "update": update} for update, named in members.items() if named], routes)


def _routed(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, str, str]]:
    """Each parameter once, with update and reason, in the order of ``named_parameters``."""
    owners: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for module_name, module in model.named_modules(remove_duplicate=True):
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module, module_name, leaf))
    head = _untied_head(model, owners)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            yield name, parameter, "frozen", "requires_grad is False"
        else:
            yield name, parameter, *_judge(owners[id(parameter)], head)


def _untied_head(model: nn.Module, owners: dict[int, list[tuple[nn.Module, str, str]]]) -> nn.Module | None:
    """The last linear layer, if it has as many outputs as an embedding has rows and no head is tied to an embedding.

    Only the last one: hidden layers may well be as wide as a table of positions is long.
    """
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if any(len(owners[id(m.weight)]) > 1 for m in embeddings):
        return None
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return linears[-1] if linears and linears[-1].out_features in {m.num_embeddings for m in embeddings} else None


def _judge(owners: list[tuple[nn.Module, str, str]], head: nn.Module | None) -> tuple[str, str]:
    modules = [module for module, _, _ in owners]
    module, module_name, leaf = owners[0]
    kind = type(module).__name__
    if any(isinstance(m, nn.Embedding) for m in modules):
        return "adamw", "embedding" + (" tied to an output head" if len(owners) > 1 else "")
    if leaf == "bias":
        return "adamw", f"bias of a {kind}"
    if isinstance(module, nn.Linear):
        if module is head:
            return "adamw", "output head: as many outputs as an embedding has rows"
        if _HEAD_NAME.search(module_name):
            return "adamw", "output head by its name"
        return "spectral", "hidden matrix of a Linear" + (" used more than once" if len(owners) > 1 else "")
    if "norm" in kind.lower():
        return "adamw", f"gain of a {kind}"
    return "adamw", f"{leaf} of a {kind}, not the matrix of a linear layer"
