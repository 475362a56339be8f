"""Options that several verbs take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


_LEAST, _MOST = 1e-9, 1e18


class Finite(click.FloatRange):
    """A number of a range; neither nan nor infinite, nor so large or so near 0 that what follows from it becomes that."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Ends with a usage error for any other."""
        number = float(super().convert(value, param, ctx))
        if number != 0 and not _LEAST <= number <= _MOST:
            self.fail(f"{value!r} must be a finite number, from {_LEAST:g} to {_MOST:g}.", param, ctx)
        return number


above_0 = Finite(min=0, min_open=True)
at_least_0 = Finite(min=0)
