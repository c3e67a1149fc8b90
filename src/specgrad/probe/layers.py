"""What a layer's input matrix is: statistics of the inputs that reach a weight, gathered over a whole step."""

import re
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specgrad.linalg.backend import exact_products
from specgrad.linalg.ranks import gram_eigenvalues, stable_rank_of_squares


@dataclass
class LinearInputs:
    """Gram matrix of a linear layer's inputs, summed over every forward pass of a step.

    Gram matrices add up over micro-batches; stable ranks do not. Products are taken in float32 (float64 for float64
    inputs) and accumulated in float64.
    """

    tokens: int = 0
    gram: Float[Tensor, "k k"] | None = None
    sources: list[int] = field(default_factory=list)

    def add(self, gram: Float[Tensor, "k k"], tokens: int, source: int) -> None:
        """Adds the Gram matrix of ``tokens`` further input rows; ``source`` numbers the input among those of the step."""
        # Out of place: layers with a common input share the matrix.
        self.gram = gram if self.gram is None else self.gram + gram
        self.tokens += tokens
        self.sources.append(source)

    def stable_rank(self) -> float:
        """Exact stable rank of all input rows; NaN before any or for zero inputs."""
        if self.gram is None:
            return float("nan")
        return float(stable_rank_of_squares(gram_eigenvalues(self.gram)))


@dataclass
class EmbeddingInputs:
    """Token counts of an embedding: its input is the token-indicator matrix, of stable rank ``1 / p_max``.

    Source: Davis and Drusvyatskiy (arXiv 2512.04299), the token-indicator structure of section 1.1.
    """

    counts: Int[Tensor, " vocabulary"]

    @property
    def tokens(self) -> int:
        """Number of tokens seen in the step."""
        return int(self.counts.sum())

    def add(self, ids: Int[Tensor, "*batch"], padding_index: int | None) -> None:
        """Counts the tokens of one forward pass; padding has no gradient and is left out."""
        flat = ids.reshape(-1).to(self.counts.device)
        if padding_index is not None:
            flat = flat[flat != padding_index]
        self.counts += torch.bincount(flat, minlength=self.counts.numel())

    def stable_rank(self) -> float:
        """Number of tokens over the count of the most frequent one; NaN before any."""
        return float(self.tokens / self.counts.max()) if self.tokens else float("nan")


def gram_of(inputs: Float[Tensor, "*batch k"]) -> tuple[Float[Tensor, "k k"], int]:
    """Gram matrix of the feature side in float64, and the number of rows."""
    rows = inputs.detach().reshape(-1, inputs.shape[-1])
    rows = rows if rows.dtype == torch.float64 else rows.float()
    if rows.dtype == torch.float32 and rows.numel() and not 1e-12 < rows.abs().max() < 1e12:
        rows = rows.double()  # squares would leave the range of float32
    with exact_products(rows.device):
        return (rows.mT @ rows).double(), rows.shape[0]


@dataclass(frozen=True)
class Layer:
    """A module whose weight is probed.

    Attributes:
        name: the module's name in the model.
        module: the module.
        kind: ``linear`` or ``embedding``.
    """

    name: str
    module: nn.Linear | nn.Embedding
    kind: str

    def new_inputs(self) -> LinearInputs | EmbeddingInputs:
        """Empty statistics for one step."""
        if isinstance(self.module, nn.Embedding):
            return EmbeddingInputs(torch.zeros(self.module.num_embeddings, dtype=torch.int64))
        return LinearInputs()


def find_layers(model: nn.Module, pattern: str | None = None) -> tuple[list[Layer], dict[str, str]]:
    """The layers of a model that can be probed, and every other parameter with the reason it is left out.

    Args:
        model: any module.
        pattern: regular expression that a layer's name must contain.

    Returns:
        Layers in the order of the model, and parameter name -> reason.

    Raises:
        ValueError: if no layer is left.
    """
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(module)
    layers: list[Layer] = []
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        matrix = module.weight if isinstance(module, nn.Linear | nn.Embedding) else None
        reason = _reason_to_skip(name, matrix, users, pattern)
        if matrix is not None and reason is None:
            layers.append(Layer(name, module, "linear" if isinstance(module, nn.Linear) else "embedding"))
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter is not matrix:
                skipped[f"{name}.{leaf}".lstrip(".")] = f"{leaf} of a {type(module).__name__}, no matrix with inputs"
            elif reason is not None:
                skipped[f"{name}.{leaf}".lstrip(".")] = reason
    if not layers:
        wanted = "contain" if pattern is None else f"contain, under a name matching {pattern!r},"
        found = ", ".join(sorted({type(m).__name__ for m in model.modules()})[:8])
        raise ValueError(f"`model` must {wanted} a trainable Linear or Embedding; got modules {found}.")
    return layers, skipped


def _reason_to_skip(name: str, matrix: Tensor | None, users: dict[int, list[nn.Module]], pattern: str | None) -> str | None:
    if matrix is None:
        return None
    if id(matrix) not in users:
        return "parametrised: the weight is computed from other parameters, which have no inputs of their own"
    if matrix.numel() == 0:
        return "empty"
    if not matrix.requires_grad:
        return "frozen: no gradient to rank"
    if len(users[id(matrix)]) > 1:
        return "tied: its gradient is a sum over uses with different inputs, so the condition is not defined"
    if pattern is not None and not re.search(pattern, name):
        return f"name does not match {pattern!r}"
    return None
