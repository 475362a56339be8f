"""What the user gives the command: settings, parameters, recipes, images; each mistake gets a clear message."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from compiled import ROOT, compiled
from penstock_pipelines.errors import InputError
from penstock_pipelines.images import ImageError, Images
from penstock_pipelines.parameters import PipelineParameters
from penstock_pipelines.pretrain import trainer_config
from penstock_pipelines.recipes import RECIPES, UnknownRecipeError, find_recipe
from penstock_pipelines.settings import load_settings
from penstock_trainer.contract.fields import ContractError

SETTINGS = """
project = "p"
location = "us-central1"
bucket = "b"
[images]
components = "c"
trainer = "t"
serving = "s"
"""


def test_the_demos_settings_are_read() -> None:
    settings = load_settings(ROOT / "penstock.toml")
    assert settings.pipeline_root == "gs://demo-penstock/pipeline-root"
    assert settings.parameters["source_uri"] == "gs://demo-penstock/raw/"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SETTINGS.replace("bucket", "buckets"), "unknown key buckets. Did you mean bucket?"),
        (SETTINGS.replace("trainer", "trianer"), "unknown key images.trianer. Did you mean images.trainer?"),
        (SETTINGS.replace('project = "p"', ""), "has no project"),
        (SETTINGS.replace('serving = "s"', ""), "has no images.serving"),
        ("project =", "is not TOML"),
        (SETTINGS.replace('"b"', '"gs://b"'), "without gs://"),
        ('allow_tags = "no"' + SETTINGS, "allow_tags = 'no' must be a bool"),
    ],
)
def test_a_wrong_settings_file_says_what_to_change(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        load_settings(path)


def test_a_missing_settings_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--settings FILE"):
        load_settings(tmp_path / "none.toml")


def test_parameters_take_the_types_that_the_pipeline_declares() -> None:
    values = PipelineParameters(compiled("tiny-zero2")).values(
        ["steps=40", "learning_rate=0.01", "source_uri=gs://b/a=b c", "seed=7"],
        {"source_uri": "gs://x/", "seed": 3},
    )
    assert values == {"steps": 40, "learning_rate": 0.01, "source_uri": "gs://b/a=b c", "seed": 7}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["stepz=3"], r"no parameter 'stepz'. Did you mean 'steps'\?"),
        (["model_id=My Model"], "model_id = 'My Model' is not valid"),
        (["steps=x"], "steps='x' is not a NUMBER_INTEGER"),
        (["steps=1.5"], "steps=1.5 is not a NUMBER_INTEGER"),
        (["steps=true"], "steps=True is not a NUMBER_INTEGER"),
        (["steps"], "not of the form NAME=VALUE"),
        (["steps=1", "steps=2"], "given twice"),
        ([], "needs a value for source_uri"),
    ],
)
def test_a_wrong_parameter_says_what_to_change(given: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PipelineParameters(compiled("tiny-zero2")).values(given, {})


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"learning_rat": 0.1}, "Did you mean 'learning_rate'"),
        ({"steps": "many"}, "steps='many' is not a NUMBER_INTEGER"),
    ],
)
def test_defaults_of_the_settings_are_checked_alike(defaults: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PipelineParameters(compiled("tiny-zero2")).values(["source_uri=gs://x/"], defaults)


def test_a_file_that_is_no_compiled_pipeline_is_refused() -> None:
    with pytest.raises(InputError, match="penstock compile"):
        PipelineParameters(ROOT / "README.md")


def test_every_parameter_of_the_console_form_has_a_description_and_a_default_or_is_required() -> None:
    definitions = yaml.safe_load(compiled("tiny-zero2").read_text())["root"]["inputDefinitions"]["parameters"]
    for name, definition in definitions.items():
        assert definition.get("description"), name
        assert definition.get("isOptional", False) == ("defaultValue" in definition), name


def test_a_value_that_the_trainer_would_refuse_is_refused_before_anything_runs() -> None:
    recipe = find_recipe("tiny-zero2")
    assert trainer_config(recipe, {"steps": 40, "source_uri": "gs://x/"}).steps == 40
    with pytest.raises(ContractError, match=r"optim\.warmup_steps"):
        trainer_config(recipe, {"steps": 3})


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UnknownRecipeError, match=r"Did you mean 'tiny-fsdp'\?"):
        find_recipe("tiny-fsd")


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_is_found_under_its_own_name(name: str) -> None:
    assert find_recipe(name).name == name


def test_our_images_need_digests_and_googles_do_not() -> None:
    pinned = "host/repo@sha256:" + "0" * 64
    Images(components=pinned, trainer=pinned, serving="google/vllm:tag").require_digests()
    with pytest.raises(ImageError, match="trainer image 'host/repo:1' has no digest"):
        Images(components=pinned, trainer="host/repo:1", serving="s").require_digests()
