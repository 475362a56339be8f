from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import Model, model_service

from penstock_local.api.dispatch import CallContext
from penstock_local.api.errors import (
    AlreadyExistsError,
    ApiError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from penstock_local.services.models import ModelService
from penstock_local.services.names import Place
from penstock_local.services.resources import ResourceStore

PARENT = "projects/demo/locations/us-central1"
NAME = "projects/42/locations/us-central1/models/lm"
CALL = CallContext(user_agent="")


class Registry:
    """A ModelService with the calls that the tests make of it."""

    def __init__(self, store: ResourceStore) -> None:
        self.service = ModelService(store, Place("demo", 42))

    def upload(self, *aliases: str, **given: Any) -> str:
        """Upload a version; its number."""
        model = Model(display_name="lm", version_aliases=aliases)
        given = given or {"parent_model": NAME}
        request = model_service.UploadModelRequest(parent=PARENT, model=model, **given)
        operation = self.service.upload_model(request, CALL)
        assert operation.done
        response = model_service.UploadModelResponse.pb(model_service.UploadModelResponse())
        assert operation.response.Unpack(response)
        version: str = response.model_version_id
        return version

    def merge(self, version: str, *aliases: str) -> Model:
        request = model_service.MergeVersionAliasesRequest(name=f"{NAME}@{version}", version_aliases=aliases)
        return self.service.merge_version_aliases(request, CALL)

    def get(self, suffix: str = "") -> Model:
        return self.service.get_model(model_service.GetModelRequest(name=NAME + suffix), CALL)

    def aliases(self) -> dict[str, list[str]]:
        request = model_service.ListModelVersionsRequest(name=NAME)
        told = self.service.list_model_versions(request, CALL).models
        return {version.version_id: sorted(version.version_aliases) for version in told}


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    store = ResourceStore(tmp_path / "db")
    yield Registry(store)
    store.close()


@pytest.fixture
def two(registry: Registry) -> Registry:
    """Version 1 is champion and default, version 2 challenger."""
    registry.upload("champion", model_id="lm")
    registry.upload("challenger")
    return registry


def test_the_first_version_is_the_default_whether_asked_or_not(registry: Registry) -> None:
    assert registry.upload(model_id="lm") == "1"
    assert registry.get().version_aliases == ["default"]


def test_a_further_version_is_the_default_only_when_asked(registry: Registry) -> None:
    registry.upload(model_id="lm")
    assert registry.upload() == "2"
    assert registry.get().version_id == "1"
    assert registry.upload("default") == "3"
    assert registry.aliases() == {"3": ["default"], "2": [], "1": []}


def test_an_alias_moves_to_the_upload_that_names_it(two: Registry) -> None:
    two.upload("challenger")
    assert two.aliases() == {"3": ["challenger"], "2": [], "1": ["champion", "default"]}


def test_promotion_moves_both_aliases_in_one_call(two: Registry) -> None:
    promoted = two.merge("2", "champion", "default", "-challenger")
    assert sorted(promoted.version_aliases) == ["champion", "default"]
    assert two.aliases() == {"2": ["champion", "default"], "1": []}


@pytest.mark.parametrize(
    ("suffix", "version"),
    [("", "1"), ("@default", "1"), ("@2", "2"), ("@challenger", "2"), ("@champion", "1")],
)
def test_a_version_is_found_by_number_alias_or_default(two: Registry, suffix: str, version: str) -> None:
    found = two.get(suffix)
    assert (found.name, found.version_id) == (NAME, version)


def test_an_alias_added_and_removed_at_once_stays_as_it_is(two: Registry) -> None:
    two.merge("1", "golden", "-golden")
    assert two.aliases()["1"] == ["champion", "default"]


def test_an_alias_that_many_move_at_once_stands_on_one_version_and_is_always_found(two: Registry) -> None:
    seen: list[str] = []

    def work(number: int) -> None:
        for _ in range(10):
            two.merge(str(1 + number % 2), "champion", "default")
            seen.append(two.get("@champion").version_id)
        two.upload("champion")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(seen) == 80
    aliases = [alias for held in two.aliases().values() for alias in held]
    assert sorted(aliases) == ["challenger", "champion", "default"]
    assert two.aliases().keys() == {str(number) for number in range(1, 11)}


def test_models_are_listed_by_their_default_version(two: Registry) -> None:
    two.upload(model_id="other")
    request = model_service.ListModelsRequest(parent=PARENT)
    told = [
        (model.name.rpartition("/")[2], model.version_id)
        for model in two.service.list_models(request, CALL).models
    ]
    assert told == [("other", "1"), ("lm", "1")]


def test_an_update_changes_what_its_mask_names_and_nothing_else(two: Registry) -> None:
    wanted = Model(name=f"{NAME}@2", display_name="new", description="unasked", labels={"a": "b"})
    request = model_service.UpdateModelRequest(
        model=wanted, update_mask={"paths": ["display_name", "labels"]}
    )
    two.service.update_model(request, CALL)
    changed = two.get("@2")
    assert (changed.display_name, changed.description, dict(changed.labels)) == ("new", "", {"a": "b"})
    assert two.get("@1").display_name == "lm"


def test_the_default_version_cannot_be_deleted_and_the_others_can(two: Registry) -> None:
    with pytest.raises(FailedPreconditionError, match="lm@1 is the default version; move `default` first"):
        two.service.delete_model_version(model_service.DeleteModelVersionRequest(name=f"{NAME}@1"), CALL)
    two.service.delete_model_version(model_service.DeleteModelVersionRequest(name=f"{NAME}@2"), CALL)
    assert list(two.aliases()) == ["1"]


def test_the_number_of_a_deleted_version_is_not_given_again(two: Registry) -> None:
    two.service.delete_model_version(model_service.DeleteModelVersionRequest(name=f"{NAME}@2"), CALL)
    assert two.upload() == "3"


def test_a_deleted_model_is_gone_with_all_its_versions(two: Registry) -> None:
    two.service.delete_model(model_service.DeleteModelRequest(name=NAME), CALL)
    for suffix in ("", "@1", "@2"):
        with pytest.raises(NotFoundError):
            two.get(suffix)


@pytest.mark.parametrize(
    ("aliases", "given", "error", "told"),
    [
        ((), {"model_id": "lm"}, AlreadyExistsError, "give it as parentModel"),
        ((), {"model_id": "LM"}, InvalidArgumentError, "modelId 'LM' is not valid"),
        ((), {"model_id": "a", "parent_model": NAME}, InvalidArgumentError, "both given"),
        ((), {"parent_model": f"{PARENT}/models/none"}, NotFoundError, "models/none does not exist"),
        (("Bad",), {"model_id": "a"}, InvalidArgumentError, "version alias 'Bad'"),
        (("7",), {"model_id": "a"}, InvalidArgumentError, "version alias '7'"),
    ],
)
def test_an_upload_that_makes_no_sense_is_refused(
    two: Registry, aliases: Sequence[str], given: dict[str, str], error: type[ApiError], told: str
) -> None:
    with pytest.raises(error, match=told):
        two.upload(*aliases, **given)


@pytest.mark.parametrize("aliases", [("-default",), ("Bad",), ("-7",)])
def test_aliases_that_cannot_be_merged_are_refused(two: Registry, aliases: Sequence[str]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"alias|Aliases"):
        two.merge("1", *aliases)
    assert two.aliases()["1"] == ["champion", "default"]
