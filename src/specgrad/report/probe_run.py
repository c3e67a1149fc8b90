"""``specgrad probe``: trains a user's model, or one built from a transformers configuration, under the probe."""

import importlib
import io
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor, nn

from specgrad.data import shakespeare
from specgrad.optim import Muon, param_groups
from specgrad.pages import plot
from specgrad.plots.heatmap import ratio_heat_map
from specgrad.plots.style import COLOURS, style
from specgrad.probe import LayerSummary, Probe, ProbeReport, likelihood_of
from specgrad.probe.objective import default_forward
from specgrad.probe.page import probe_page
from specgrad.runs.interrupt import StopRequest
from specgrad.runs.seeds import stream

OnRecord = Callable[[int, dict[str, Any]], None]

# Rows of the table that is shown while training runs.
_SHOWN = 24


@dataclass(frozen=True)
class ProbeOptions:
    """Settings of ``specgrad probe``.

    Attributes:
        target: package.module:callable that returns (model, loader, loss_fn); the loader yields (inputs, targets), and
            loss_fn takes (outputs, targets).
        hf: instead, a model type of transformers such as gpt2, llama or mixtral; trained on the shipped text by bytes.
        random_init: the model of --hf starts from random weights; needed, since nothing is downloaded.
        config: settings of the configuration of --hf, such as n_layer=2.
        steps: optimizer steps.
        every: steps between measurements.
        optimizer: muon (hidden matrices spectral, AdamW elsewhere) or adamw.
        lr: learning rate of the spectral steps.
        adamw_lr: learning rate of AdamW.
        batch_size: sequences per step with --hf.
        context: tokens per sequence with --hf.
        advantage: measure the predicted advantage (level 2) on the last batch.
        gain: audit it by line searches (level 3), about 20 forward passes per block.
        exact: exact stable ranks instead of estimates.
        pattern: regular expression that probed layers must contain.
        device: device of the model, such as cpu or cuda.
        seed: seed of weights, batches and dropout with --hf.
        out: folder for report.html, probe.csv and probe.jsonl.
    """

    target: str | None = None
    hf: str | None = None
    random_init: bool = False
    config: tuple[str, ...] = ()
    steps: int = 200
    every: int = 10
    optimizer: Literal["muon", "adamw"] = "muon"
    lr: float = 0.02
    adamw_lr: float = 3e-4
    batch_size: int = 8
    context: int = 64
    advantage: bool = True
    gain: bool = False
    exact: bool = False
    pattern: str | None = None
    device: str = "cpu"
    seed: int = 0
    out: Path = Path("specgrad-probe")

    def __post_init__(self) -> None:
        if (self.target is None) == (self.hf is None):
            raise ValueError(
                f"`specgrad probe` needs either a target package.module:callable or --hf; got {self.target}, {self.hf}."
            )
        if self.hf is not None and not self.random_init:
            raise ValueError(f"`hf` models start from random weights here, nothing is downloaded; got {self.hf!r} without "
                             "--random-init.")  # fmt: skip
        for name in ("steps", "every", "batch_size", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be >= 1; got {getattr(self, name)}.")


@dataclass(frozen=True)
class ProbeRun:
    """What ``specgrad probe`` found.

    Attributes:
        report: the probe's report.
        losses: training loss of every step.
        path: the page.
        interrupted: whether Ctrl-C or SIGTERM ended the training early; the report covers the steps that were done.
    """

    report: ProbeReport
    losses: list[float]
    path: Path
    interrupted: bool = False


def run_probe(options: ProbeOptions, on_record: OnRecord | None = None) -> ProbeRun:
    """Trains under the probe with a live table, then writes page, CSV and JSON lines; Ctrl-C ends the training, not that.

    Args:
        options: settings.
        on_record: a run tracker: called with step and numbers after each measurement and with each step's loss.

    Raises:
        ValueError: for a target that cannot be loaded or does not return (model, loader, loss_fn), or an unknown type.
        FloatingPointError: if the loss is not finite.
    """
    model, loader, loss_fn = load_target(options.target) if options.target is not None else build_hf(options)
    model = model.to(options.device)
    probe = Probe(model, options.every, options.pattern, exact=options.exact, on_record=on_record)
    optimizer = _optimizer(model, options)
    losses: list[float] = []
    console = Console(stderr=True)
    live = Live(console=console, refresh_per_second=2) if console.is_terminal else None
    inputs: Any = None
    targets: Any = None
    options.out.mkdir(parents=True, exist_ok=True)
    if options.hf is not None:
        torch.manual_seed(stream(options.seed, "dropout").initial_seed())
    with probe, live or nullcontext(), StopRequest() as stopped:
        for step, (inputs, targets) in enumerate(itertools.islice(_forever(loader), options.steps)):
            inputs, targets = _to(inputs, options.device), _to(targets, options.device)
            loss = loss_fn(default_forward(model, inputs), targets)
            if not torch.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss.item()} at step {step}; lower --lr or --adamw-lr")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if on_record is not None:
                on_record(step, {"loss": losses[-1]})
            if probe.step():
                if live is not None:
                    live.update(live_table(probe.report(), step, losses[-1]))
                else:
                    console.print(f"step {step}: loss {losses[-1]:.4f}. {probe.report().summary()}", highlight=False)
            if stopped():
                break
    if not stopped():
        _levels(probe, options, inputs, targets, loss_fn, console)
    report = probe.report()
    report.save(options.out / "probe.csv")
    report.save(options.out / "probe.jsonl")
    page = options.out / "report.html"
    page.write_text(probe_page(report, drawings(report)), encoding="utf-8")
    return ProbeRun(report, losses, page, stopped())


def drawings(report: ProbeReport) -> list[Markup]:
    """The ratio of every matrix over time, and predictions against line searches; each where there is something to see."""
    found = []
    rows = [row for row in report.records if row["kind"] != "gain"]
    names, steps = (list(dict.fromkeys(row[key] for row in rows)) for key in ("layer", "step"))
    if len(steps) > 1:
        ratios = {(row["layer"], row["step"]): row["ratio"] for row in rows}
        grid = np.array([[ratios.get((name, step), math.nan) for step in steps] for name in names])
        with style():
            figure = Figure(figsize=(5.4, 0.9 + 0.17 * len(names)))
            axes = figure.subplots()
            colours = ratio_heat_map(axes, grid, names, steps)
            axes.set_xlabel("optimizer step")
            bar = figure.colorbar(colours, ax=axes, pad=0.02, ticks=[1 / 16, 1 / 4, 1, 4, 16])
            bar.ax.set_yticklabels(["1/16", "1/4", "1", "4", "16"])
            bar.set_label("nr(G) / st(A)")
            caption = (
                "Nuclear rank of the gradient over stable rank of the inputs: blue above 1, red below, grey no verdict."
            )
            found.append(plot(_svg(figure), caption))
    pairs = report.audit().rows
    if pairs:
        x, y = (np.array([row[key] for row in pairs]) for key in ("predicted", "realised"))
        ends = [0.85 * min(x.min(), y.min()), 1.18 * max(x.max(), y.max())]
        with style():
            figure = Figure(figsize=(5.4, 4.2))
            axes = figure.subplots()
            axes.plot(ends, ends, color="black", lw=1)
            axes.plot(x, y, "o", color=COLOURS["muon"], ms=4, alpha=0.7, mew=0)
            axes.set(xlabel="predicted advantage", ylabel="realised advantage", xscale="log", yscale="log")
            axes.set(xlim=ends, ylim=ends)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5)))
                axis.set_major_formatter(FormatStrFormatter("%g"))
                axis.set_minor_formatter(NullFormatter())
            found.append(plot(_svg(figure), "Predicted against realised advantage of a spectral step; line: equal."))
    return found


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _levels(probe: Probe, options: ProbeOptions, inputs: Any, targets: Any, loss_fn: Any, console: Console) -> None:
    """Levels 2 and 3 on the last batch, where the loss has a sampler."""
    if not (options.advantage or options.gain):
        return
    try:
        likelihood = likelihood_of(getattr(loss_fn, "likelihood", loss_fn))
    except ValueError as error:
        console.print(f"level 2 and 3 are left out: {error}", highlight=False)
        return
    if options.advantage:
        probe.measure_advantage(inputs, targets, likelihood)
    if options.gain:
        probe.measure_gain(inputs, targets, likelihood)


def live_table(report: ProbeReport, step: int, loss: float) -> Table:
    """The layers as a terminal shows them."""
    table = Table(title=f"step {step}, loss {loss:.4f}. {report.summary()}", title_justify="left")
    for name in ("layer", "st(A)", "nr(G)", "ratio", "verdict", "held"):
        table.add_column(name, justify="left" if name in ("layer", "verdict") else "right")
    colours = {"holds": "green", "marginal": "yellow", "fails": "red", "undefined": "dim"}
    layers = [layer for layer in report.layers if layer.kind != "gain"]
    for layer in layers[:_SHOWN]:
        table.add_row(*_cells(layer), style=colours[layer.verdict] if layer.verdict != "holds" else None)
    if len(layers) > _SHOWN:
        table.caption = f"{len(layers) - _SHOWN} more in the report"
    return table


def _cells(layer: LayerSummary) -> tuple[str, ...]:
    ranks = (f"{layer.stable_rank:.1f}", f"{layer.nuclear_rank:.1f}", f"{layer.ratio:.2f}")
    return (layer.layer, *ranks, layer.verdict, f"{layer.held:.0%}")


def load_target(target: str) -> tuple[nn.Module, Iterable[Any], Callable[..., Tensor]]:
    """Calls ``package.module:callable``, found from the current folder too.

    Raises:
        ValueError: if it cannot be imported or does not return (model, loader, loss_fn).
    """
    module, _, name = target.partition(":")
    if not name:
        raise ValueError(f"`target` must be package.module:callable; got {target!r}.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        build = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"`target` must name something that can be imported; got {target!r} ({error}).") from error
    found = build()
    if not (isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], nn.Module) and callable(found[2])):
        raise ValueError(f"`target` must return (model, loader, loss_fn); {target} returned {type(found).__name__}.")
    return found


class _NextToken:
    """Mean cross-entropy of targets that are already shifted."""

    likelihood = "cross_entropy"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())


def build_hf(options: ProbeOptions) -> tuple[nn.Module, Iterable[Any], Callable[..., Tensor]]:
    """A causal language model from a transformers configuration, and byte windows of the shipped text.

    Raises:
        ValueError: for an unknown type, a setting that is no pair, a vocabulary without room for bytes or
            a context longer than the model's.
        ModuleNotFoundError: without transformers.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("--hf needs transformers; install it with: pip install 'specgrad[hf]'") from error
    settings = dict(_setting(pair) for pair in options.config)
    try:
        config = transformers.AutoConfig.for_model(options.hf, **settings)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(stream(options.seed, "weights").get_state())
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError) as error:
        raise ValueError(f"`hf` must be a causal model type of transformers; got {options.hf!r} ({error}).") from error
    if config.vocab_size < 256:
        raise ValueError(f"`vocab_size` must leave room for 256 bytes; got {config.vocab_size}.")
    room = getattr(config, "max_position_embeddings", None) or options.context
    if options.context > room:
        raise ValueError(
            f"`context` must fit the {room} positions of the {options.hf} configuration; got {options.context}."
        )
    tokens = shakespeare().tokens().long()

    def windows() -> Iterator[tuple[Tensor, Tensor]]:
        for step in itertools.count():
            generator = stream(options.seed, "batches", step)
            starts = torch.randint(len(tokens) - options.context, (options.batch_size, 1), generator=generator)
            batch = tokens[starts + torch.arange(options.context + 1)]
            yield batch[:, :-1], batch[:, 1:]

    return model, windows(), _NextToken()


def _setting(pair: str) -> tuple[str, Any]:
    name, _, value = pair.partition("=")
    if not (name and value):
        raise ValueError(f"`config` must hold settings such as n_layer=2; got {pair!r}.")
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, {"true": True, "false": False}.get(value.lower(), value)


def _optimizer(model: nn.Module, options: ProbeOptions) -> torch.optim.Optimizer:
    if options.optimizer == "adamw":
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.adamw_lr)
    return Muon(param_groups(model), lr=options.lr, adamw_lr=options.adamw_lr)


def _forever(loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    while True:
        count = 0
        for batch in loader:
            if not (isinstance(batch, tuple | list) and len(batch) == 2):
                raise ValueError(f"the loader must yield (inputs, targets); got {type(batch).__name__}.")
            count += 1
            yield batch[0], batch[1]
        if not count:
            raise ValueError("the loader must yield at least one batch; it is empty.")


def _to(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(v, device) for key, v in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_to(v, device) for v in value)
    return value
