"""The half of `penstock run --faults` that runs in the stand-in's environment."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from penstock_pipelines.errors import InputError
from penstock_pipelines.settings import load_settings
from penstock_pipelines.verbs.options import parameter_option
from penstock_pipelines.verbs.processes import EXIT_INTERRUPTED


@click.command(hidden=True)
@click.argument("compiled", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--faults", type=click.Path(path_type=Path), required=True)
@click.option("--control", required=True, help="URL of the stand-in's own API.")
@click.option("--run-id")
@click.option("--json", "as_json", is_flag=True)
@parameter_option
@click.pass_obj
def rehearse(
    settings_file: Path | None,
    compiled: Path,
    faults: Path,
    control: str,
    run_id: str | None,
    as_json: bool,
    parameters: tuple[str, ...],
) -> None:
    """Run COMPILED undisturbed and then with faults, and judge what became of each. Called by `run --faults`."""
    from rich.console import Console

    from penstock_pipelines.faults import FaultControl, read_faults
    from penstock_pipelines.faults_table import print_rows, to_json
    from penstock_pipelines.parameters import PipelineParameters
    from penstock_pipelines.rehearsal import Rehearsal, parameters_of
    from penstock_pipelines.verbs.runs import defaults

    settings = load_settings(settings_file)
    console = Console(stderr=as_json)
    rehearsal = Rehearsal(
        compiled=compiled,
        parameters=parameters_of(compiled, parameters, defaults(settings, PipelineParameters(compiled))),
        settings=settings,
        console=console,
        control=FaultControl(control),
    )
    try:
        rehearsed = rehearsal.run(read_faults(faults), faults, run_id)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    if as_json:
        about = {
            "ok": rehearsed.ok,
            "run": rehearsed.run,
            "state": rehearsed.state,
            "clean_run": rehearsed.clean_run,
        }
        click.echo(to_json(rehearsed.rows, **about))
    else:
        console.print(f"\n{rehearsed.run}: {rehearsed.state.lower()}", style="bold", highlight=False)
        print_rows(console, rehearsed.rows)
    sys.exit(0 if rehearsed.ok else 1)


def require_no_json(as_json: bool, faults: Path | None) -> None:
    """Raise InputError for --json of a run without faults, which has no table to tell."""
    if as_json and faults is None:
        raise InputError("--json tells the table of --faults FILE; give that too.")


def check_faults(faults: Path) -> None:
    """Raise InputError for a file whose entries are wrong. What the stand-in takes it says itself, before anything runs."""
    from penstock_pipelines.faults import read_faults

    read_faults(faults)
