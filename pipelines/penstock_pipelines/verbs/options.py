"""Options that several verbs take."""

from __future__ import annotations

from pathlib import Path

import click

from penstock_pipelines.local import DEFAULT_STATE

state_option = click.option(
    "--state",
    type=click.Path(path_type=Path),
    default=DEFAULT_STATE,
    show_default=True,
    help="State directory of the stand-in.",
)
parameter_option = click.option(
    "-p", "--param", "parameters", multiple=True, metavar="NAME=VALUE", help="Run time parameter; repeatable."
)
images_option = click.option(
    "--images",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Image map (TOML) for further images.",
)
allow_tags_option = click.option(
    "--allow-tags", is_flag=True, help="Compile although our images have no digest."
)
