"""The command line: ``specgrad demo``, ``specgrad figures``, ``specgrad figure``."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

_NEEDS_LAB = "specgrad: error: the command line needs the extra `lab` (missing: {name}). Run: pip install 'specgrad[lab]'"


def main() -> None:
    """Entry point; mistakes of the user end in one line and exit status 2, a failed check in 1, Ctrl-C in 130."""
    try:
        import tyro

        from specgrad.report.demo import DemoOptions
    except ModuleNotFoundError as error:
        sys.exit(_NEEDS_LAB.format(name=error.name))
    except KeyboardInterrupt:
        sys.exit(130)
    from specgrad.gpt import Interrupted

    app = tyro.extras.SubcommandApp()

    @app.command(name="demo")
    def demo(options: Annotated[DemoOptions, tyro.conf.arg(name="")], resume: bool = False) -> int:
        """Train three optimizers on real text, probe the layers, write a report.

        Args:
            options: settings.
            resume: continue the demo that was interrupted in --out, with its own settings.
        """
        return _demo(options, resume)

    @app.command(name="figures")
    def figures() -> int:
        """List the figures: name, claim, runs of each preset."""
        return _figures()

    @app.command(name="figure")
    def figure(
        name: tyro.conf.Positional[str],
        preset: Literal["quick", "paper"] = "quick",
        out: Path = Path("specgrad-figures"),
    ) -> int:
        """Run what a figure needs, draw it, check its claim.

        Args:
            name: name of the figure, as `specgrad figures` lists it; all for every figure.
            preset: quick takes at most a minute on two cores, paper is the paper's own setting.
            out: folder for drawings, tables and stored runs.
        """
        return _figure(name, preset, out)

    try:
        status = app.cli(
            prog="specgrad",
            description="Train, probe and report; draw and check figures.",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except ValueError as error:
        print(f"specgrad: error: {error}", file=sys.stderr)
        status = 2
    except FloatingPointError as error:
        print(f"specgrad: stopped: {error}", file=sys.stderr)
        status = 1
    except (Interrupted, KeyboardInterrupt) as stop:
        print(f"specgrad: interrupted: {str(stop) or 'Ctrl-C'}. Finished runs are kept.", file=sys.stderr)
        status = 130
    sys.exit(status)


def _demo(options: object, resume: bool) -> int:
    from specgrad.gpt import Interrupted
    from specgrad.report.demo import DemoOptions, run_demo, saved_options

    assert isinstance(options, DemoOptions)
    if resume:
        if options != DemoOptions(out=options.out):
            raise ValueError(
                "`--resume` continues with the settings of the interrupted demo; give no other option but `--out`."
            )
        options = saved_options(options.out)
    try:
        result = run_demo(options)
    except Interrupted as stop:
        out = "" if options.out == DemoOptions().out else f" --out {shlex.quote(str(options.out))}"
        print(f"Interrupted after step {stop.step}. Continue with: specgrad demo --resume{out}", file=sys.stderr)
        return 130
    print(*result.checks, sep="\n")
    for outcome in result.outcomes:
        print(f"{outcome.label:<28} validation loss {outcome.val_loss:.4f}  training {outcome.seconds:.0f} s")
    print(f"Report: {result.path}")
    return 0


def _figures() -> int:
    from specgrad.figures._figure import claim, figure_names, load_figure

    for name in figure_names():
        module = load_figure(name)
        presets = ", ".join(f"{preset} ({len(configs)} runs)" for preset, configs in module.PRESETS.items())
        print(f"{name}\n  {claim(module)}\n  presets: {presets}; paper: {module.PAPER}, {module.FIGURE}")
    return 0


def _figure(name: str, preset: str, out: Path) -> int:
    from specgrad.figures._collect import collect, publish
    from specgrad.figures._figure import Watch, claim, figure_names, load_figure, run_of
    from specgrad.runs import Store
    from specgrad.runs.interrupt import StopRequest

    names: Sequence[str] = figure_names() if name == "all" else [name]
    modules = [load_figure(name) for name in names]
    store = Store(out / "runs")
    failed = False
    with StopRequest() as stop:
        for name, module in zip(names, modules, strict=True):
            print(f"{name}: {claim(module)}", flush=True)
            table = collect(
                module,
                module.PRESETS[preset],
                store,
                lambda config, module=module: Watch(None, stop, store.checkpoint(run_of(module, config))),  # type: ignore[misc]
            )
            checks = publish(module, table, out, name)
            print(*checks, sep="\n", flush=True)
            failed |= not all(check.passed for check in checks)
    print(f"Drawings and tables: {out}")
    return int(failed)
