"""The command line: the main job, figures and sweeps, and what helps around them."""

import sys
from pathlib import Path
from typing import Annotated

_NEEDS_LAB = "specgrad: error: the command line needs the extra `lab` (missing: {name}). Run: pip install 'specgrad[lab]'"


def main() -> None:
    """Entry point; mistakes of the user end in one line and exit status 2, a failed check or run in 1, Ctrl-C in 130."""
    try:
        if sys.argv[1:] == ["--version"]:
            import specgrad

            print(f"specgrad {specgrad.__version__}")
            sys.exit(0)
        import tyro  # noqa: F401

        from specgrad.figures._collect import RunsFailed, RunsMissing
    except ModuleNotFoundError as error:
        sys.exit(_NEEDS_LAB.format(name=error.name))
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        status = _app()
    except (ValueError, ModuleNotFoundError) as error:
        print(f"specgrad: error: {error}", file=sys.stderr)
        status = 2
    except (FloatingPointError, RunsFailed) as error:
        print(f"specgrad: stopped: {error}", file=sys.stderr)
        status = 1
    except (RunsMissing, KeyboardInterrupt) as stop:
        print(f"specgrad: interrupted: {str(stop) or 'Ctrl-C'}. Finished runs are kept.", file=sys.stderr)
        status = 130
    except BrokenPipeError:
        # Whoever read our output has enough, as in `specgrad figures | head`.
        sys.stderr.close()
        status = 0
    sys.exit(status)


def _app() -> int:
    import tyro
    from tyro.conf import Positional, arg

    from specgrad.cli.experiments import (
        SweepOptions,
        WorkOptions,
        do_figure,
        do_reproduce,
        do_status,
        do_sweep,
        list_figures,
    )
    from specgrad.cli.overrides import overrides_type
    from specgrad.cli.probe import Arguments
    from specgrad.report.demo import DemoOptions

    app = tyro.extras.SubcommandApp()
    # The settings of the figure that is asked for become options.
    Settings = overrides_type(sys.argv[1:])

    @app.command(name="demo")
    def demo(options: Annotated[DemoOptions, arg(name="")], resume: bool = False) -> int:
        """Train three optimizers on real text, probe the layers, write a report.

        Args:
            options: settings.
            resume: continue the demo that was interrupted in --out, with its own settings.
        """
        from specgrad.cli.demo import do_demo

        return do_demo(options, resume)

    @app.command(name="probe")
    def probe(options: Annotated[Arguments, arg(name="")], track: str | None = None) -> int:
        """Train a model of yours under the probe, write what its layers want.

        Args:
            options: settings.
            track: where records go as they come: jsonl:FOLDER, tensorboard:FOLDER, wandb:PROJECT or mlflow:EXPERIMENT.
        """
        from specgrad.cli.probe import do_probe

        return do_probe(options, track)

    @app.command(name="figures")
    def figures(store: Path = Path("specgrad-figures/runs")) -> int:
        """List the figures: name, what it shows, claim, runs of each preset and how many of them are done.

        Args:
            store: folder of stored runs.
        """
        return list_figures(store)

    @app.command(name="figure")
    def figure(
        name: Positional[str] = "",
        *,
        options: Annotated[WorkOptions, arg(name="")],
        settings: Annotated[Settings, arg(name="")],  # type: ignore[valid-type]
    ) -> int:
        """Run what a figure needs, draw it, check its claim; with a figure's name, --help lists its settings too.

        Args:
            name: name of the figure, as `specgrad figures` lists it.
            options: how it is done.
            settings: settings of the figure's runs.
        """
        return do_figure(name, options, settings)

    @app.command(name="reproduce")
    def reproduce(names: Positional[tuple[str, ...]] = (), *, options: Annotated[WorkOptions, arg(name="")]) -> int:
        """Do figures, all of them by default, and write one page that shows them with claims, checks, settings and times.

        Args:
            names: names of figures.
            options: how it is done.
        """
        return do_reproduce(names, options)

    @app.command(name="sweep")
    def sweep(
        name: Positional[str] = "",
        *,
        options: Annotated[SweepOptions, arg(name="")],
        settings: Annotated[Settings, arg(name="")],  # type: ignore[valid-type]
    ) -> int:
        """Do the runs of a figure, or the part of them that --shard names, without drawing.

        Args:
            name: name of the figure.
            options: how it is done.
            settings: settings of the figure's runs.
        """
        return do_sweep(name, options, settings)

    @app.command(name="status")
    def status(
        names: Positional[tuple[str, ...]] = (),
        *,
        preset: str = "quick",
        store: Path = Path("specgrad-figures/runs"),
        module: str | None = None,
    ) -> int:
        """Say which runs of figures, all of them by default, are done, missing or failed, and why.

        Args:
            names: names of figures.
            preset: quick or paper.
            store: folder of stored runs.
            module: a figure module from elsewhere, by its importable name.
        """
        return do_status(names, preset, store, module)

    @app.command(name="doctor")
    def doctor(device: str = "cpu") -> int:
        """Show versions, machine and calibration, and test the precision of the kernels.

        Args:
            device: device to test, such as cpu or cuda.
        """
        from specgrad.cli.doctor import do_doctor

        return do_doctor(device)

    @app.command(name="cite")
    def cite(name: Positional[str] = "") -> int:
        """Print BibTeX of what a figure uses, or of everything.

        Args:
            name: name of a figure.
        """
        from specgrad.cli.cite import do_cite

        return do_cite(name)

    status_code: int = app.cli(
        prog="specgrad",
        description="Train, probe and report; run, draw and check figures.",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return status_code
