"""The report of the main job, as a page."""

import math
import shlex
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgrad import gpt
from specgrad.pages import (
    Column,
    Section,
    Tile,
    checks,
    code,
    details,
    heading,
    plot,
    render_page,
    settings,
    side_by_side,
    table,
    text,
)
from specgrad.plots import COLOURS
from specgrad.probe.page import LAYER_COLUMNS, layer_row
from specgrad.probe.report import CAVEAT
from specgrad.report.demo_result import DemoResult

if TYPE_CHECKING:
    from specgrad.report.demo import DemoOptions


def demo_page(result: DemoResult, figures: Path, options: "DemoOptions") -> str:
    """The page, with the drawings in ``figures`` embedded."""
    tiles = [
        Tile(
            o.label, f"{o.val_loss:.3f}",
            "nats per byte, validation" if o.update == "adamw" else f"{-o.gain:+.3f} ± {o.gain_stderr:.3f} against AdamW",
            COLOURS[o.update],
        )
        for o in result.outcomes
    ]  # fmt: skip
    sections = [
        _order(result),
        _curves(result, figures),
        _layers(result),
        _over_time(result, figures),
        _provenance(result, options),
    ]
    return render_page("Which layers want spectral updates, and what did they gain?", _lead(result), sections, tiles)


def _lead(result: DemoResult) -> list[str]:
    config, outcomes = result.about[0]["config"], result.outcomes
    size = gpt.SIZES[config["size"]]
    full = outcomes[-1]
    layers = [layer for layer in result.layers["adamw"] if result.advice(layer)[0] == "spectral"]
    hidden = [x for x in result.layers["adamw"] if x.kind == "linear" and x.layer != "head"]
    share = result.share_of_mlp_outputs
    gained = f"ends {full.gain:.3f} nats per byte below AdamW" if full.gain > 0 else "gains nothing over AdamW"
    first = (
        f"A decoder with {size.depth} blocks of width {size.width} ({_mlp(config['mlp'])}) learned {config['text']} for "
        f"{config['steps']} steps, three times from the same weights and batches. Muon on all hidden matrices {gained}"
    )
    if outcomes[1].gain <= 0:
        first += "; on the MLP output matrices alone it gains nothing"
    elif not math.isnan(share):
        first += f"; on the MLP output matrices alone it gains {outcomes[1].gain:.3f}, {share:.0%} of that"
    sure = "On this evidence" if all(check.passed for check in result.checks) else "With the failed checks below in mind"
    in_regime = sum(layer.verdict == "holds" for layer in result.layers["adamw"])
    second = (
        f"{sure}, {len(layers)} of {len(hidden)} hidden matrices want spectral updates; embedding and head stay with "
        f"AdamW. The paper's condition, nuclear rank of the gradient against stable rank of the inputs, holds with margin "
        f"on {in_regime} of {len(result.layers['adamw'])} matrices at the end of the AdamW run."
    )
    return [first + ".", second]


def _mlp(kind: str) -> str:
    return {"relu2": "squared ReLU", "swiglu": "SwiGLU"}[kind]


def _order(result: DemoResult) -> Section:
    items = [(c.passed, c.name, f"expected {c.expected}, got {c.got}; tolerance: {c.tolerance}") for c in result.checks]
    published = gpt.theory.PUBLISHED_LOSSES[result.about[0]["config"]["mlp"]]
    share = gpt.share_of_gain(*(published[update] for update in gpt.theory.EXPECTED_ORDER))
    note = (
        f"In the published ablation at 160M parameters and 10,000 steps (Wang et al., arXiv 2509.26030) the losses are "
        f"{published['adamw']:.3f}, {published['muon-out']:.3f}, {published['muon']:.3f}, with {share:.0%} of the gain from "
        "the MLP outputs. The default learning rates were chosen on the validation part of the shipped text with seed 0. "
        "Standard errors here are over held-out windows of this text for one seed, and say nothing about "
        "other seeds."
    )
    return Section("Is the expected order there?", [checks(items), text(note, note=True)])


def _curves(result: DemoResult, figures: Path) -> Section:
    columns = (
        Column("optimizer"), Column("final validation loss", 4), Column("± s.e.", 4), Column("gain over AdamW", 4),
        Column("steps to AdamW's last loss", 0), Column("training, s", 1), Column("AdamW lr", 4), Column("Muon lr", 4),
    )  # fmt: skip
    rows = [
        (o.label, o.val_loss, o.val_stderr, o.gain, o.steps_to_adamw, o.seconds, o.adamw_lr, o.muon_lr)
        for o in result.outcomes
    ]
    caption = "Markers: running validation loss. Thin lines: training loss, smoothed over 20 steps."
    drawn = plot((figures / "losses.svg").read_text(encoding="utf-8"), caption)
    return Section("Loss curves", [drawn, table(columns, rows, sortable=True)])


def _layers(result: DemoResult) -> Section:
    columns = (
        *LAYER_COLUMNS,
        Column("favoured", classed=True),
        Column("gain measured for its group, nats per byte", wide=True),
    )
    rows = [(*layer_row(layer), *result.advice(layer)) for layer in result.layers["adamw"]]
    first = text("Last measurement of the AdamW run: what a user who trains with AdamW today would see.")
    return Section("Layer by layer", [first, table(columns, rows, sortable=True), text(CAVEAT, note=True)])


def _over_time(result: DemoResult, figures: Path) -> Section:
    caption = "Ratio of nuclear rank to stable rank: blue where the condition holds, red where it fails, grey undefined."
    drawn = plot((figures / "condition.svg").read_text(encoding="utf-8"), caption)
    verdicts = text("Verdicts in words, with formula, threshold and how often the condition held:")
    for outcome in result.outcomes:
        layers = result.layers[outcome.update]
        holds = sum(layer.verdict == "holds" for layer in layers)
        title = f"{outcome.label}: holds on {holds} of {len(layers)} matrices at the end"
        verdicts += details(title, [str(layer) for layer in layers])
    return Section("Over time", [side_by_side(drawn, verdicts)])


def _provenance(result: DemoResult, options: "DemoOptions") -> Section:
    config, provenance = result.about[0]["config"], result.about[0]["provenance"]
    shared = {k: v for k, v in config.items() if k not in ("update", "adamw_lr", "muon_lr")}
    machine = {k: provenance[k] for k in ("processor", "cores", "threads", "device", "system", "host", "git")}
    versions = {k: v for k, v in provenance["versions"].items() if v is not None}
    walls = {
        o.label: f"{o.seconds:.1f} s training (measured steps left out); {o.wall_seconds:.1f} s wall in its last session"
        for o in result.outcomes
    }
    return Section(
        "Settings and how to reproduce",
        [
            code(command_line(options)),
            heading("Settings"),
            settings(shared | {"seed": result.about[0]["seed"]}),
            heading("Wall times"),
            settings(walls),
            heading("Machine"),
            settings(machine),
            heading("Versions"),
            settings(versions),
            text(
                "Beside this file: tables/ (CSV), figures/ (PDF, SVG, PNG, CSV, LaTeX) and runs/ (parquet, one file per run "
                f"with settings and provenance inside). First run on {provenance['time']}.",
                note=True,
            ),
        ],
    )


def command_line(options: "DemoOptions") -> str:
    """The command that repeats a demo: every option that is not the default."""
    words = ["specgrad", "demo"]
    for field in fields(options):
        value: Any = getattr(options, field.name)
        if value != field.default:
            flag = f"--{field.name.replace('_', '-')}"
            words += [flag] if value is True else [flag, shlex.quote(str(value))]
    return " ".join(words)
