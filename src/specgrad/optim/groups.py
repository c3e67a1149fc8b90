"""Routing: which parameter of a model gets which update, and why."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from specgrad.optim.blocks import Blocks
from specgrad.optim.checks import UPDATES

# Names that output heads go by where neither weight tying nor a matching embedding gives them away.
_HEAD_NAME = re.compile(r"(^|\.)(lm_head|head|unembed|unembedding|classifier|logits|fc_out|output_projection)$")

# Beyond this aspect ratio (a LoRA factor of rank 8 in width 4096 has 512) the small side carries too few directions for
# the polar factor to be more than amplified noise.
_LARGEST_ASPECT = 128

_Owner = tuple[nn.Module, str, str]


@dataclass(frozen=True)
class Route:
    """Where one parameter goes.

    Attributes:
        name: the parameter's first name in ``model.named_parameters()``.
        shape: its shape.
        update: ``spectral``, ``sign``, ``adamw``, ``sgd`` or ``frozen``.
        reason: why, in words.
        blocks: the matrices inside it, where it is not simply one.
    """

    name: str
    shape: tuple[int, ...]
    update: str
    reason: str
    blocks: Blocks | None = None


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


def param_groups(
    model: nn.Module, overrides: Mapping[str, str] | None = None, blocks: Mapping[str, Blocks] | None = None
) -> ParamGroups:
    """Groups of a model's parameters: hidden matrices spectral, everything else AdamW.

    Spectral: weights of linear layers and of convolutions (flattened; one block per group), and the fused projection of
    ``nn.MultiheadAttention`` (three blocks). AdamW: embeddings, output heads (tied to an embedding, last with as many
    outputs as an embedding has rows, or named like a head), norms, biases, depthwise kernels, single rows and columns,
    matrices of aspect ratio above 128, and whatever needs a declaration (stacked experts). Frozen parameters are reported
    and left out; shared ones are reported once.

    Args:
        model: any module.
        overrides: regular expression -> ``spectral``, ``sign``, ``adamw`` or ``sgd``; a parameter takes the first pattern
            found in its name (``re.search``).
        blocks: regular expression -> `Blocks`, the matrices inside a parameter: fused or per-head projections, stacked
            experts. What is declared becomes spectral unless overridden.

    Returns:
        A list of one group per update and declaration, ready for `specgrad.optim.Muon`; ``print`` it to see every route.

    Raises:
        ValueError: if the model has no trainable parameter, a pattern matches no parameter, an override names an unknown
            update, or a parameter does not fit its declaration.

    Example:
        >>> print(param_groups(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, bias=False))))
        parameter  shape  update    reason
        0.weight   3x4    spectral  hidden matrix of a Linear
        0.bias     3      adamw     bias of a Linear
        2.weight   2x3    spectral  hidden matrix of a Linear
    """
    overrides, blocks = overrides or {}, blocks or {}
    names = [name for name, _ in model.named_parameters()]
    for update in overrides.values():
        if update not in UPDATES:
            raise ValueError(f"`overrides` of `param_groups` must map to one of {', '.join(UPDATES)}; got {update!r}.")
    for argument, patterns in (("overrides", overrides), ("blocks", blocks)):
        for pattern in patterns:
            if not any(re.search(pattern, name) for name in names):
                raise ValueError(f"`{argument}` of `param_groups` has the pattern {pattern!r}, which matches no parameter.")
    groups: dict[tuple[str, Blocks | None], list[tuple[str, Tensor]]] = {}
    routes: list[Route] = []
    for name, parameter, route in _routed(model):
        if route.update != "frozen":
            route = _amended(route, parameter, overrides, blocks)
            groups.setdefault((route.update, route.blocks), []).append((name, parameter))
        routes.append(route)
    if not groups:
        raise ValueError("`model` of `param_groups` must have at least one trainable parameter; got none.")
    return ParamGroups(
        [
            {"params": named, "update": update} | ({"blocks": declared} if declared is not None else {})
            for (update, declared), named in groups.items()
        ],
        routes,
    )


def _amended(route: Route, parameter: Tensor, overrides: Mapping[str, str], blocks: Mapping[str, Blocks]) -> Route:
    """The route after the user's declarations and overrides."""
    update, reason, declared = route.update, route.reason, route.blocks
    for pattern, wanted_blocks in blocks.items():
        if re.search(pattern, route.name):
            update, reason, declared = "spectral", f"declared by {pattern!r}", wanted_blocks
            break
    for pattern, wanted in overrides.items():
        if re.search(pattern, route.name):
            update, reason = wanted, f"override {pattern!r}"
            break
    if update != "spectral":
        return Route(route.name, route.shape, update, reason)
    try:
        (declared or Blocks()).views(parameter.detach().to("meta"))
    except ValueError as error:
        raise ValueError(f"{reason}: {route.name} {error}.") from None
    return Route(route.name, route.shape, update, reason, declared)


def _routed(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Route]]:
    """Each parameter once with its route, in the order of ``named_parameters``."""
    owners: dict[int, list[_Owner]] = {}
    for module_name, module in model.named_modules(remove_duplicate=True):
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module, module_name, leaf))
    head = _untied_head(model, owners)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            update, reason, blocks = _judge(parameter, owners[id(parameter)], head)
        else:
            update, reason, blocks = "frozen", "requires_grad is False", None
        yield name, parameter, Route(name, tuple(parameter.shape), update, reason, blocks)


def _untied_head(model: nn.Module, owners: dict[int, list[_Owner]]) -> nn.Module | None:
    """The last linear layer, if it has as many outputs as an embedding has rows and no head is tied to an embedding.

    Only the last one: hidden layers may well be as wide as a table of positions is long.
    """
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if any(len(owners[id(m.weight)]) > 1 for m in embeddings):
        return None
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return linears[-1] if linears and linears[-1].out_features in {m.num_embeddings for m in embeddings} else None


def _judge(parameter: nn.Parameter, owners: list[_Owner], head: nn.Module | None) -> tuple[str, str, Blocks | None]:
    """Update, reason and blocks of a trainable parameter from the modules that own it."""
    module, module_name, leaf = owners[0]
    kind = type(module).__name__
    if any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m, _, _ in owners):
        return "adamw", "embedding" + (" tied to an output head" if len(owners) > 1 else ""), None
    if "bias" in leaf:
        return "adamw", f"bias of a {kind}", None
    if parameter.numel() == 0:
        return "adamw", "empty", None
    if "norm" in kind.lower() and not isinstance(module, nn.Linear):
        return "adamw", f"gain of a {kind}", None
    if parameter.ndim < 2:
        return "adamw", f"{leaf} of a {kind}, not a matrix", None
    found = _matrix_of(module, leaf, kind, parameter)
    if found is None:
        if parameter.ndim > 2:
            return "adamw", f"{parameter.ndim} axes: declare `blocks` (batch or flatten) to make it spectral", None
        return "adamw", f"{leaf} of a {kind}, not known as a hidden matrix", None
    reason, blocks = found
    if module is head:
        return "adamw", "output head: as many outputs as an embedding has rows", None
    if _HEAD_NAME.search(module_name):
        return "adamw", "output head by its name", None
    if blocks is None and reason.startswith("depthwise"):
        return "adamw", reason, None
    rows, cols = (blocks or Blocks()).views(parameter.detach().to("meta"))[0].shape[-2:]
    if min(rows, cols) == 1:
        return "adamw", f"a single {'row' if rows == 1 else 'column'}", None
    if max(rows, cols) > _LARGEST_ASPECT * min(rows, cols):
        return "adamw", f"aspect ratio {max(rows, cols) / min(rows, cols):.0f}, above {_LARGEST_ASPECT}", None
    return "spectral", reason + (" used more than once" if len(owners) > 1 else ""), blocks


def _matrix_of(module: nn.Module, leaf: str, kind: str, parameter: nn.Parameter) -> tuple[str, Blocks | None] | None:
    """Why a parameter is a hidden matrix, and its blocks; None for module types that are not known."""
    if isinstance(module, nn.Linear):
        return f"hidden matrix of a {kind}", None
    if isinstance(module, nn.MultiheadAttention) and leaf == "in_proj_weight":
        return "fused query, key, value of a MultiheadAttention, three blocks", Blocks(rows=3)
    if isinstance(module, nn.MultiheadAttention) and leaf.endswith("_proj_weight"):
        return f"{leaf[0]} projection of a MultiheadAttention", None
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and leaf == "weight":
        if module.groups > 1 and parameter.shape[1] == 1:
            return f"depthwise kernel of a {kind}", None
        parts = f", {module.groups} blocks" if module.groups > 1 else ""
        return f"kernel of a {kind}, flattened{parts}", Blocks("flatten", rows=module.groups)
    if kind == "Conv1D" and parameter.ndim == 2:
        return "hidden matrix of a Conv1D, stored inputs x outputs", Blocks(transposed=True)
    return None
