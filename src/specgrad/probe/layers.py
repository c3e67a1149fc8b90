"""Which parameters of a model are matrices with inputs, what blocks they consist of, and why the others are left out."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from specgrad.optim.blocks import Blocks

Kind = Literal["linear", "convolution", "embedding", "attention", "experts", "gain"]

# Names of a projection of attention's output, and of the value projection beside it whose input is its core activation.
_ATTENTION_OUTPUT = ("o_proj", "out_proj", "output", "wo", "c_proj", "proj", "dense")
_ATTENTION_VALUE = ("v_proj", "value", "wv", "c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv")

_REFUSED = {
    nn.RNNBase: "recurrent weights see a different input at every time step, which no hook reaches",
    nn.RNNCellBase: "a recurrent cell: its condition over time is not defined here",
    nn.EmbeddingBag: "sums of embeddings have no token indicator",
    nn.Bilinear: "two inputs",
    nn.modules.conv._ConvTransposeNd: "transposed convolution: its patches overlap on the output side",
}


@dataclass(frozen=True)
class Block:
    """One matrix inside a weight.

    Attributes:
        label: its name inside the layer; empty for the whole weight.
        index: where it lies in the stored tensor.
        stream: which of the layer's inputs it sees.
        columns: the range of input features it sees; None for all.
    """

    label: str = ""
    index: tuple[slice | int, ...] = ()
    stream: int = 0
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class Layer:
    """A weight that is probed.

    Attributes:
        name: name of the module, for several weights of one module with the parameter's own name.
        parameter: name of the parameter in the model.
        module: the module that owns it.
        leaf: the parameter's name in the module.
        kind: what its inputs are: see `specgrad.probe.streams`.
        blocks: the matrices inside it.
        transposed: stored inputs x outputs.
        modules: all modules that use it.
        undefined: why there can be no verdict; empty otherwise.
        core: layer whose inputs are the core activation of this attention output; empty otherwise.
    """

    name: str
    parameter: str
    module: nn.Module
    leaf: str
    kind: Kind
    blocks: tuple[Block, ...] = (Block(),)
    transposed: bool = False
    modules: tuple[nn.Module, ...] = ()
    undefined: str = ""
    core: str = ""

    @property
    def weight(self) -> Tensor:
        """The parameter as it is now."""
        weight: Tensor = getattr(self.module, self.leaf)
        return weight

    def matrix(self, tensor: Tensor, block: Block) -> Tensor:
        """A block of the weight, or of a tensor laid out like it, as outputs x inputs; a vector for a gain."""
        part = tensor[block.index] if block.index else tensor
        if self.kind == "gain":
            return part
        part = part.reshape(part.shape[0], -1)
        return part.mT if self.transposed else part

    def block_name(self, block: Block) -> str:
        """Name under which a block is reported."""
        return f"{self.name}[{block.label}]" if block.label else self.name


def find_layers(
    model: nn.Module, pattern: str | None = None, blocks: Mapping[str, Blocks] | None = None
) -> tuple[list[Layer], dict[str, str]]:
    """The layers of a model that can be probed, and every other parameter with the reason it is left out.

    Args:
        model: any module.
        pattern: regular expression that a layer's name must contain.
        blocks: regular expression on parameter names -> the matrices inside, as in `specgrad.optim.param_groups`.

    Returns:
        Layers in the order of the model, and parameter name -> reason.

    Raises:
        ValueError: if no layer is left, ``pattern`` is no regular expression, or a declaration matches no parameter or does
            not fit it.
    """
    blocks = blocks or {}
    check_pattern(pattern)
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((name, module, leaf))
    layers: list[Layer] = []
    skipped: dict[str, str] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{leaf}".lstrip(".")
            found = _layer(name, module, leaf, parameter, owners[id(parameter)])
            if isinstance(found, Layer) and pattern is not None and not re.search(pattern, found.name):
                found = f"name does not match {pattern!r}"
            if isinstance(found, str):
                skipped[full] = found
            elif found.undefined or id(parameter) not in seen:
                layers.append(found)
            seen.add(id(parameter))
    for wanted, declared in blocks.items():
        chosen = [i for i, layer in enumerate(layers) if re.search(wanted, layer.parameter)]
        if not chosen:
            raise ValueError(f"`blocks` of `Probe` has the pattern {wanted!r}, which matches no probed parameter.")
        for i in chosen:
            layers[i] = _declared(layers[i], declared)
    if not layers:
        wanted = "contain" if pattern is None else f"contain, under a name matching {pattern!r},"
        kinds = ", ".join(sorted({type(m).__name__ for m in model.modules()})[:8])
        why = "; ".join(sorted(set(skipped.values()))[:4]) or "it has no parameters"
        raise ValueError(
            f"`model` must {wanted} a trainable matrix such as a Linear or Embedding; got modules {kinds} ({why})."
        )
    if all(layer.kind == "gain" for layer in layers) and pattern is None:
        raise ValueError("`model` must contain a trainable matrix such as a Linear or Embedding; got norm gains only.")
    return [_with_core(layer, layers) for layer in layers], skipped


def check_pattern(pattern: str | None) -> None:
    """Refuses what is no regular expression.

    Raises:
        ValueError: if it does not compile.
    """
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ValueError(f"`pattern` must be a regular expression; got {pattern!r} ({error}).") from None


def _layer(
    name: str, module: nn.Module, leaf: str, parameter: nn.Parameter, owners: list[tuple[str, nn.Module, str]]
) -> Layer | str:
    """The layer that a parameter is, or why it is none."""
    kind = type(module).__name__
    if not parameter.requires_grad:
        return "frozen: no gradient to rank"
    if parameter.numel() == 0:
        return "empty"
    if parameter.is_complex():
        return "complex: ranks are measured on real matrices only"
    if leaf == "bias" or leaf.endswith("_bias") or leaf.startswith("bias_"):
        return "bias: an extra input row of ones, which the condition leaves out"
    if isinstance(module, nn.utils.parametrize.ParametrizationList) or hasattr(module, "parametrizations"):
        return "parametrised: the weight is computed from other parameters, which have no inputs of their own"
    for refused, reason in _REFUSED.items():
        if isinstance(module, refused):
            return f"{kind}: {reason}"
    full = f"{name}.{leaf}".lstrip(".")
    named = name if leaf == "weight" and name else full
    spec = _spec(module, leaf, parameter)
    if isinstance(spec, str):
        return spec
    what, blocks, transposed = spec
    modules = tuple(owner for _, owner, _ in owners)
    undefined = ""
    if len({_role(owner) for owner in modules}) > 1:
        modules, undefined = (module,), "tied: its gradient is a sum over uses whose inputs lie on different sides"
    return Layer(named, full, module, leaf, what, blocks, transposed, modules, undefined)


def _role(module: nn.Module) -> str:
    return "embedding" if isinstance(module, nn.Embedding) else "linear"


def _spec(module: nn.Module, leaf: str, parameter: Tensor) -> tuple[Kind, tuple[Block, ...], bool] | str:
    """Kind, blocks and storage order of a parameter, or why it is not probed."""
    kind = type(module).__name__
    whole = (Block(),)
    if isinstance(module, nn.Embedding):
        return "embedding", whole, False
    if isinstance(module, nn.Linear) and leaf == "weight":
        return "linear", whole, False
    if kind == "Conv1D" and parameter.ndim == 2 and leaf == "weight":
        return "linear", whole, True
    if kind.endswith("Router") and parameter.ndim == 2 and leaf == "weight":
        return "linear", whole, False
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if module.groups > 1 and parameter.shape[0] == module.groups:
            return f"depthwise kernel of a {kind}: each block is a single row"
        rows = parameter.shape[0] // module.groups
        parts = tuple(Block(str(g), (slice(g * rows, (g + 1) * rows),), g) for g in range(module.groups))
        return "convolution", parts if module.groups > 1 else whole, False
    if isinstance(module, nn.MultiheadAttention):
        if leaf == "in_proj_weight":
            width = module.embed_dim
            labels = enumerate(("query", "key", "value"))
            return "attention", tuple(Block(n, (slice(i * width, (i + 1) * width),), i) for i, n in labels), False
        if leaf in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            return "attention", (Block(stream="qkv".index(leaf[0])),), False
        return f"{leaf} of a {kind}, no matrix with inputs"
    if parameter.ndim == 1 and leaf == "weight" and re.search("RMSNorm|LayerNorm", kind):
        return "gain", whole, False
    experts = _experts(module, leaf, parameter)
    if experts is not None:
        return experts
    if parameter.ndim < 2:
        return f"{leaf} of a {kind}, no matrix with inputs"
    return f"{leaf} of a {kind}, a module whose inputs are not known"


def _experts(module: nn.Module, leaf: str, parameter: Tensor) -> tuple[Kind, tuple[Block, ...], bool] | str | None:
    """Stacked expert weights as transformers stores them: ``gate_up_proj`` and ``down_proj`` with experts first."""
    up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if parameter.ndim != 3 or leaf not in ("gate_up_proj", "down_proj"):
        return None
    if not (isinstance(up, Tensor) and isinstance(down, Tensor) and up.ndim == down.ndim == 3):
        return f"stacked {leaf} of a {type(module).__name__}, a layout that is not known"
    if up.shape[1] == 2 * down.shape[2] and up.shape[2] == down.shape[1]:
        transposed = False
    elif up.shape[2] == 2 * down.shape[1] and up.shape[1] == down.shape[2]:
        transposed = True
    else:
        return f"stacked {leaf} of a {type(module).__name__}, a layout that is not known"
    if leaf == "down_proj" or not getattr(module, "is_concatenated", True):
        return "experts", tuple(Block(str(e), (e,), e) for e in range(len(parameter))), transposed
    half = parameter.shape[2 if transposed else 1] // 2
    parts = (("gate", slice(0, half)), ("up", slice(half, 2 * half)))
    every = slice(None)
    blocks = [
        Block(f"{e}.{label}", (e, every, where) if transposed else (e, where), e)
        for e in range(len(parameter))
        for label, where in parts
    ]
    return "experts", tuple(blocks), transposed


def _declared(layer: Layer, declared: Blocks) -> Layer:
    """The layer split as a user declared."""
    if layer.kind not in ("linear", "embedding"):
        raise ValueError(f"`blocks` of `Probe` can split linear weights; got {layer.parameter} of kind {layer.kind}.")
    shape = layer.weight.shape
    try:
        declared.views(torch.empty(shape, device="meta"))
    except ValueError as error:
        raise ValueError(f"`blocks` of `Probe`: {layer.parameter} {error}.") from None
    rows, cols = _ranges(declared.rows, shape[0]), _ranges(declared.cols, shape[1])
    blocks = []
    for i, (low, high) in enumerate(rows):
        for j, (left, right) in enumerate(cols):
            label = ",".join(str(n) for n, parts in ((i, rows), (j, cols)) if len(parts) > 1)
            columns = (low, high) if layer.transposed else (left, right)
            whole = len(rows if layer.transposed else cols) == 1
            blocks.append(Block(label, (slice(low, high), slice(left, right)), 0, None if whole else columns))
    return _replaced(layer, blocks=tuple(blocks))


def _ranges(parts: int | tuple[int, ...], length: int) -> list[tuple[int, int]]:
    sizes = [length // parts] * parts if isinstance(parts, int) else list(parts)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _replaced(layer: Layer, **changes: object) -> Layer:
    return Layer(**({name: getattr(layer, name) for name in Layer.__dataclass_fields__} | changes))


def _with_core(layer: Layer, layers: list[Layer]) -> Layer:
    parent, _, leaf = layer.name.rpartition(".")
    if layer.kind != "linear" or leaf not in _ATTENTION_OUTPUT:
        return layer
    siblings = [o for o in layers if o.name.rpartition(".")[0] == parent and o.name.rpartition(".")[2] in _ATTENTION_VALUE]
    return _replaced(layer, core=siblings[0].name) if siblings else layer


def trainable_names(model: nn.Module) -> Iterator[str]:
    """Names of all parameters, shared ones under each of their names."""
    for name, _ in model.named_parameters(remove_duplicate=False):
        yield name
