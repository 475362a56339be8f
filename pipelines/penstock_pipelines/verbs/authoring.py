"""compile and check: what an author and CI do before anything runs."""

from __future__ import annotations

import gc
import logging
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock_pipelines.errors import InputError
from penstock_pipelines.settings import FILE_NAME, Settings, load_settings
from penstock_pipelines.verbs.options import above_0, allow_tags_option

if TYPE_CHECKING:
    from penstock_components.jobs.review import Rate
    from penstock_pipelines.check import Checked
    from penstock_pipelines.recipe import Recipe


@click.command("compile")
@click.argument("recipe", default="tiny-zero2")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Default: build/<recipe>.yaml.")
@allow_tags_option
@click.pass_obj
def compile_(settings_file: Path | None, recipe: str, output: Path | None, allow_tags: bool) -> None:
    """Compile RECIPE to a pipeline spec; prints its SHA-256, and warnings about its training job."""
    settings = load_settings(settings_file)
    path, digest, _ = compile_to(settings, recipe, output, allow_tags)
    click.echo(f"{digest}  {path}")


@click.command()
@click.argument("target")
@click.option(
    "--against",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An older file: say what changed, as a change review.",
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--location", help="Region of the job. Default: that of penstock.toml, if there is one.")
@click.option(
    "--epoch-tokens",
    type=above_0,
    help="With --tokens-per-second: hours per epoch, before and after.",
)
@click.option("--tokens-per-second", type=above_0, help="Of one accelerator, measured.")
@click.pass_obj
def check(
    settings_file: Path | None,
    target: str,
    against: Path | None,
    as_json: bool,
    location: str | None,
    epoch_tokens: float | None,
    tokens_per_second: float | None,
) -> None:
    """Judge TARGET before anything is submitted: every fault with its field, its reason and what to write.

    TARGET is a file, or - for the standard input, that holds a CustomJob, its spec or a HyperparameterTuningJob in JSON or
    YAML, or a compiled pipeline; or it is the name of a recipe. Ends with 1 when there is an error.
    """
    if (epoch_tokens is None) != (tokens_per_second is None):
        raise InputError("--epoch-tokens and --tokens-per-second go together; give both or none.")
    if epoch_tokens is not None and against is None:
        raise InputError("--epoch-tokens is for hours per epoch before and after; give --against OLD too.")
    rate = _rate(epoch_tokens, tokens_per_second)
    checked = _check(settings_file, target, against, location, rate)
    click.echo(checked.to_json() if as_json else checked.told())
    sys.exit(checked.exit_code)


def _rate(epoch_tokens: float | None, tokens_per_second: float | None) -> Rate | None:
    if epoch_tokens is None or tokens_per_second is None:
        return None
    from penstock_components.jobs.review import Rate

    return Rate(epoch_tokens=epoch_tokens, tokens_per_second=tokens_per_second)


def _check(
    settings_file: Path | None, target: str, against: Path | None, location: str | None, rate: Rate | None
) -> Checked:
    from penstock_components.jobs.findings import JobSpecError
    from penstock_pipelines.check import check_target, read_document, refused

    path = Path(target)
    has_settings = settings_file is not None or Path(FILE_NAME).exists()
    if path.is_file() or target == "-":
        settled = location or (load_settings(settings_file).location if has_settings else "")
        return check_target(target, read_document(path), location=settled, against=against, rate=rate)
    if path.suffix or "/" in target:
        raise InputError(f"{target} is not a file.")
    settings = load_settings(settings_file)
    settings = replace(settings, location=location or settings.location)
    with tempfile.TemporaryDirectory() as directory:
        try:
            compiled = _compiled(settings, target, Path(directory) / f"{target}.yaml")
        except JobSpecError as exc:
            return refused(target, exc.findings)
        return check_target(
            target, compiled.read_text(), location=settings.location, against=against, rate=rate
        )


def compile_to(
    settings: Settings, name: str, output: Path | None, allow_tags: bool
) -> tuple[Path, str, Recipe]:
    """The compiled recipe, the SHA-256 of its bytes, and the recipe. Raises InputError for what is wrong with it."""
    gc.disable()  # what is loaded here stays; looking through it again and again takes a twentieth of the time
    try:
        return _compile(settings, name, output, allow_tags)
    finally:
        gc.enable()


def _compile(
    settings: Settings, name: str, output: Path | None, allow_tags: bool
) -> tuple[Path, str, Recipe]:
    from penstock_pipelines.lean_kfp import load_kfp

    load_kfp()
    from penstock_components.jobs.findings import JobSpecError
    from penstock_components.machines.catalogue import MachineError
    from penstock_pipelines.compile import compile_recipe
    from penstock_pipelines.images import ImageError
    from penstock_pipelines.recipes import UnknownRecipeError, find_recipe
    from penstock_trainer.contract.fields import ContractError

    try:
        recipe = find_recipe(name)
        path = output or Path("build") / f"{recipe.name}.yaml"
        if path.suffix not in (".yaml", ".yml", ".json"):
            raise InputError(f"--output {path} must end in .yaml, .yml or .json.")
        allowed = allow_tags or settings.allow_tags
        digest = compile_recipe(recipe, settings.images, path, location=settings.location, allow_tags=allowed)
    except (UnknownRecipeError, ImageError, JobSpecError, MachineError, ContractError) as exc:
        raise InputError(str(exc)) from exc
    except OSError as exc:
        raise InputError(f"{path} cannot be written: {exc.strerror}.") from exc
    return path, digest, recipe


def _compiled(settings: Settings, name: str, output: Path) -> Path:
    """A recipe compiled to be looked at only, so tags do. Raises JobSpecError as it is, InputError for the rest."""
    from penstock_components.jobs.findings import JobSpecError

    logging.getLogger("penstock_components.jobs").setLevel(logging.ERROR)  # its warnings are findings here
    try:
        return compile_to(settings, name, output, allow_tags=True)[0]
    except InputError as exc:
        if isinstance(exc.__cause__, JobSpecError):
            raise exc.__cause__ from exc
        raise
