"""A Model Registry in memory, on the API's own messages: what Vertex AI documents about versions and aliases."""

from types import SimpleNamespace

from google.api_core.exceptions import AlreadyExists, InvalidArgument, NotFound
from google.cloud.aiplatform_v1 import types

PROJECT, LOCATION = "p", "europe-west4"
PARENT = f"projects/{PROJECT}/locations/{LOCATION}"


class InMemoryModelService:
    """The three methods of ModelServiceClient that `registry.ModelClient` names; requests are real protos."""

    def __init__(self):
        self.models: dict[str, dict[str, types.Model]] = {}
        self.merges: list[list[str]] = []
        self.refusal: Exception | None = None

    def upload_model(self, *, request):
        request = types.UploadModelRequest(request)
        if request.parent_model:
            if request.parent_model not in self.models:
                raise NotFound(request.parent_model)
            name = request.parent_model
        else:
            name = f"{request.parent}/models/{request.model_id}"
            if name in self.models:
                raise AlreadyExists(name)
            self.models[name] = {}
        versions = self.models[name]
        version = types.Model(request.model)
        version.version_id = str(len(versions) + 1)
        version.name = f"{name}@{version.version_id}"
        versions[version.version_id] = version
        aliases = [*request.model.version_aliases, *([] if len(versions) > 1 else ["default"])]
        version.version_aliases = []
        self._apply(name, version.version_id, aliases)
        response = types.UploadModelResponse(model=name, model_version_id=version.version_id)
        return SimpleNamespace(result=lambda timeout: response)

    def list_model_versions(self, *, request):
        if self.refusal is not None:
            raise self.refusal
        request = types.ListModelVersionsRequest(request)
        if request.name not in self.models:
            raise NotFound(request.name)
        return [types.Model(version) for version in self.models[request.name].values()]

    def merge_version_aliases(self, *, request):
        request = types.MergeVersionAliasesRequest(request)
        name, _, version_id = request.name.partition("@")
        if version_id not in self.models.get(name, {}):
            raise NotFound(request.name)
        self.merges.append(list(request.version_aliases))
        self._apply(name, version_id, request.version_aliases)
        merged = types.Model(self.models[name][version_id])
        merged.name = name
        return merged

    def _apply(self, name, version_id, aliases):
        """An alias that is applied leaves the version that had it; `default` can only be moved."""
        if "-default" in aliases:
            raise InvalidArgument("a model must have exactly one default version")
        version = self.models[name][version_id]
        for alias in aliases:
            for other in self.models[name].values():
                if alias.removeprefix("-") in other.version_aliases and (
                    other is version or not alias.startswith("-")
                ):
                    other.version_aliases.remove(alias.removeprefix("-"))
            if not alias.startswith("-"):
                version.version_aliases.append(alias)

    def aliases(self, model_id):
        """Aliases by version id."""
        versions = self.models.get(f"{PARENT}/models/{model_id}", {})
        return {version_id: set(version.version_aliases) for version_id, version in versions.items()}
