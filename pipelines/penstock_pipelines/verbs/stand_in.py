"""local up, env, down: the stand-in as a background server."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from penstock_pipelines.errors import InputError
from penstock_pipelines.local import find_server, start_server
from penstock_pipelines.settings import load_settings
from penstock_pipelines.verbs.options import images_option, state_option


@click.group()
def local() -> None:
    """The stand-in as a background server."""


@local.command()
@state_option
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port of the front door; 0 takes a free one."
)
@images_option
@click.pass_obj
def up(settings_file: Path | None, state: Path, port: int, images: Path | None) -> None:
    """Start it; it goes on until `penstock local down`."""
    if find_server(state) is not None:
        raise InputError(
            f"a stand-in is running on {state} already; `penstock local env` shows how to reach it."
        )
    server = start_server(state, load_settings(settings_file), port=port, images=images)
    click.echo(f"stand-in on 127.0.0.1:{server.front_port}, process {server.pid}, state {state}")


@local.command()
@state_option
def env(state: Path) -> None:
    """Print the variables that lead any client to it: eval "$(penstock local env)"."""
    server = find_server(state)
    if server is None:
        raise InputError(
            f"no stand-in is running on {state}; start one with `penstock local up --state {state}`."
        )
    for name in server.unset:
        click.echo(f"unset {name}")
    for name, value in server.variables.items():
        click.echo(f"export {name}={shlex.quote(value)}")


@local.command()
@state_option
def down(state: Path) -> None:
    """Cancel what it runs and end it."""
    server = find_server(state)
    if server is None:
        click.echo(f"no stand-in is running on {state}")
        return
    server.stop()
    click.echo("stopped")
