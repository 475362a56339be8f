"""google.cloud.aiplatform.v1.ModelService: the registry with its versions and aliases.

A resource here is one version, named `.../models/ID@VERSION`; a model is the set of its versions.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from google.cloud.aiplatform_v1.types import Model, model_service
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2

from penstock_local.api.dispatch import CallContext
from penstock_local.api.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from penstock_local.services.custom_jobs import done_operation
from penstock_local.services.names import Place
from penstock_local.services.resources import ResourceStore, list_page, now

DEFAULT_ALIAS = "default"
_ALIAS = re.compile(r"[a-z][a-zA-Z0-9-]{0,126}[a-z0-9]")
_MODEL_ID = re.compile(r"[a-z0-9_-]{1,63}")


@dataclass
class ModelService:
    """Models of one stand-in."""

    store: ResourceStore
    place: Place
    _lock: threading.RLock = field(default_factory=threading.RLock)
    """Held from the first look at a model's versions to the last change: an alias stands on one version at most."""

    def upload_model(
        self, request: model_service.UploadModelRequest, _: CallContext
    ) -> operations_pb2.Operation:
        """Register a model, or a version of `parent_model`; the operation is done at once."""
        parent = self.place.parent(request.parent)
        model = Model(request.model)
        if not model.display_name:
            raise InvalidArgumentError("model.displayName is empty; give the model a name.")
        for alias in model.version_aliases:
            _check_alias(alias)
        with self._lock:
            model_name, number = self._next_version(parent, request)
            self.store.put_text(_counter_key(model_name), str(number))
            aliases = {*model.version_aliases, *([DEFAULT_ALIAS] if number == 1 else [])}
            model.name, model.version_id = f"{model_name}@{number}", str(number)
            model.version_aliases = []
            model.create_time = model.update_time = now()
            model.version_create_time = model.version_update_time = model.create_time
            self.store.insert(model, parent=parent)
            self._set_aliases(model.name, add=sorted(aliases), remove=[])
        response = model_service.UploadModelResponse(model=model_name, model_version_id=str(number))
        return done_operation(model_name, model_service.UploadModelResponse.pb(response))

    def get_model(self, request: model_service.GetModelRequest, _: CallContext) -> Model:
        """A version by number or alias; the default one when the name has neither."""
        return _shown(self._version(request.name))

    def list_models(self, request: model_service.ListModelsRequest, _: CallContext) -> Any:
        """The default version of each model of a location."""
        versions = self.store.all(Model, self.place.parent(request.parent))
        page, token = list_page([_shown(v) for v in versions if DEFAULT_ALIAS in v.version_aliases], request)
        return model_service.ListModelsResponse(models=page, next_page_token=token)

    def list_model_versions(self, request: model_service.ListModelVersionsRequest, _: CallContext) -> Any:
        """All versions of a model."""
        versions = self._versions(_without_version(self.place.name(request.name)))
        page, token = list_page([_shown(version) for version in versions], request)
        return model_service.ListModelVersionsResponse(models=page, next_page_token=token)

    def merge_version_aliases(
        self, request: model_service.MergeVersionAliasesRequest, _: CallContext
    ) -> Model:
        """Add aliases to a version, or take those away that are written with a leading `-`."""
        add = [alias for alias in request.version_aliases if not alias.startswith("-")]
        remove = [alias[1:] for alias in request.version_aliases if alias.startswith("-")]
        both = set(add) & set(remove)
        for alias in (*add, *remove):
            _check_alias(alias)
        if DEFAULT_ALIAS in remove:
            raise InvalidArgumentError(
                "versionAliases: `default` cannot be removed, only moved to another version."
            )
        with self._lock:
            name = self._version(request.name).name
            self._set_aliases(
                name, add=[a for a in add if a not in both], remove=[r for r in remove if r not in both]
            )
            return _shown(self.store.get(Model, name))

    def update_model(self, request: model_service.UpdateModelRequest, _: CallContext) -> Model:
        """Change the fields that the mask names; a version's own fields and the model's are not told apart."""
        allowed = {"display_name", "description", "labels", "version_description"}
        paths = list(request.update_mask.paths)
        if not paths or not set(paths) <= allowed:
            raise InvalidArgumentError(f"updateMask is {paths}; allowed are {', '.join(sorted(allowed))}.")

        def change(model: Model) -> None:
            for path in paths:
                setattr(model, path, getattr(request.model, path))
            model.update_time = model.version_update_time = now()

        with self._lock:
            return _shown(self.store.update(Model, self._version(request.model.name).name, change))

    def delete_model(
        self, request: model_service.DeleteModelRequest, _: CallContext
    ) -> operations_pb2.Operation:
        """Forget a model with all its versions."""
        name = _without_version(self.place.name(request.name))
        with self._lock:
            for version in self._versions(name):
                self.store.delete(Model, version.name)
        return done_operation(name, empty_pb2.Empty())

    def delete_model_version(
        self, request: model_service.DeleteModelVersionRequest, _: CallContext
    ) -> operations_pb2.Operation:
        """Forget one version. Raises FailedPreconditionError for the default one."""
        with self._lock:
            version = self._version(request.name)
            if DEFAULT_ALIAS in version.version_aliases:
                raise FailedPreconditionError(f"{version.name} is the default version; move `default` first.")
            self.store.delete(Model, version.name)
        return done_operation(version.name, empty_pb2.Empty())

    def _next_version(self, parent: str, request: model_service.UploadModelRequest) -> tuple[str, int]:
        if request.parent_model:
            if request.model_id:
                raise InvalidArgumentError(
                    "modelId and parentModel are both given; modelId is for a new model only."
                )
            name = _without_version(self.place.name(request.parent_model))
            self._versions(name)  # there is such a model
            # Counted beside the versions: the number of a deleted one is not given again.
            return name, int(self.store.get_text(_counter_key(name)) or 0) + 1
        model_id = request.model_id or self.store.next_id()
        if _MODEL_ID.fullmatch(model_id) is None:
            raise InvalidArgumentError(
                f"modelId {model_id!r} is not valid: 1 to 63 lower-case letters, digits, hyphens and underscores."
            )
        name = f"{parent}/models/{model_id}"
        if any(True for _ in self._all_versions(name)):
            raise AlreadyExistsError(f"{name} exists already; give it as parentModel to add a version.")
        return name, 1

    def _version(self, given: str) -> Model:
        name, _, version = self.place.name(given).partition("@")
        with self._lock:  # not between an alias's leaving one version and its coming to another
            versions = self._versions(name)
        wanted = version or DEFAULT_ALIAS
        for candidate in versions:
            if wanted == candidate.version_id or wanted in candidate.version_aliases:
                return candidate
        raise NotFoundError(f"{name} has no version {wanted!r}.")

    def _versions(self, name: str) -> list[Model]:
        versions = list(self._all_versions(name))
        if not versions:
            raise NotFoundError(f"Model {name} does not exist.")
        return versions

    def _all_versions(self, name: str) -> Iterable[Model]:
        parent = name.rpartition("/models/")[0]
        return (
            version for version in self.store.all(Model, parent) if _without_version(version.name) == name
        )

    def _set_aliases(self, name: str, *, add: list[str], remove: list[str]) -> None:
        """An alias stands on one version at most: adding it here takes it from where it was."""
        for version in self._versions(_without_version(name)):
            gone = set(remove) if version.name == name else set(add)
            kept = [alias for alias in version.version_aliases if alias not in gone]
            if version.name == name:
                kept += [alias for alias in add if alias not in kept]
            if kept != list(version.version_aliases):
                self.store.update(Model, version.name, functools.partial(_replace_aliases, aliases=kept))


def _replace_aliases(model: Model, aliases: list[str]) -> None:
    model.version_aliases = aliases
    model.version_update_time = now()


def _shown(version: Model) -> Model:
    """As the API shows it: the name without the version."""
    shown = Model(version)
    shown.name = _without_version(version.name)
    return shown


def _counter_key(model_name: str) -> str:
    return f"last version of {model_name}"


def _without_version(name: str) -> str:
    return name.partition("@")[0]


def _check_alias(alias: str) -> None:
    if _ALIAS.fullmatch(alias) is None:
        raise InvalidArgumentError(f"version alias {alias!r} is not valid; it must match {_ALIAS.pattern}.")
