"""The `penstock` command. Heavy libraries are imported by the verb that needs them, so that `--help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from penstock_pipelines.errors import PenstockError, ServiceError
from penstock_pipelines.verbs.authoring import check, compile_
from penstock_pipelines.verbs.checkpoints import checkpoints
from penstock_pipelines.verbs.planning import plan
from penstock_pipelines.verbs.processes import EXIT_INTERRUPTED
from penstock_pipelines.verbs.rehearsals import rehearse
from penstock_pipelines.verbs.runs import logs, run, status, submit
from penstock_pipelines.verbs.schedules import schedule
from penstock_pipelines.verbs.stand_in import local


class _Command(click.Group):
    """Shows errors of ours as one message and ends with their exit code."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except PenstockError as exc:
            click.echo(f"error: {exc}", err=True)
            context.exit(exc.exit_code)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            context.exit(EXIT_INTERRUPTED)
        except Exception as exc:
            # Told by its module: importing Google's exceptions here would cost every verb their import.
            if not type(exc).__module__.startswith(("google.auth", "google.api_core")):
                raise
            click.echo(f"error: {exc}", err=True)
            context.exit(ServiceError.exit_code)


@click.group(cls=_Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--settings",
    "settings_file",
    type=click.Path(path_type=Path),
    help="Settings file; default penstock.toml.",
)
@click.version_option(package_name="penstock")
@click.pass_context
def main(context: click.Context, settings_file: Path | None) -> None:
    """Distributed training pipelines: compile, run on the embedded stand-in, submit to Vertex AI.

    Exit codes: 0 ok, 1 findings or a run that failed, 2 wrong input, 3 the service, 130 interrupted.
    """
    context.obj = settings_file


for verb in (compile_, check, plan, run, rehearse, submit, status, logs, schedule, checkpoints, local):
    main.add_command(verb)


if __name__ == "__main__":
    main()
