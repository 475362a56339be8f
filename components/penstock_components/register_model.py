"""Component `register_model`: a version in the Vertex AI Model Registry, and the aliases that follow from the verdict."""
# ruff: noqa: ARG001 # kfp reads the signature; the launcher reads the executor input

from typing import Any

from google_cloud_pipeline_components.types.artifact_types import VertexModel
from kfp import dsl

from penstock_components.container import LOCATION, PROJECT, launcher_spec


def register_model(image: str) -> Any:
    """The component, running in `image` (the components image)."""

    def register_model(
        model: dsl.Input[dsl.Model],
        verdict: dsl.Input[dsl.Artifact],
        model_id: str,
        serving_image: str,
        registered: dsl.Output[VertexModel],
        resource_name: dsl.OutputPath(str),  # type: ignore[valid-type]  # kfp reads the call
        version_id: dsl.OutputPath(str),  # type: ignore[valid-type]  # kfp reads the call
        aliases: dsl.OutputPath(str),  # type: ignore[valid-type]  # kfp reads the call
        display_name: str = "",
        description: str = "",
        run_name: str = dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
        project: str = PROJECT,
        location: str = LOCATION,
    ) -> dsl.ContainerSpec:
        """Upload the model as a version with the alias challenger; promoted, it takes champion and default at once.

        Args:
            model: The export, from sync_checkpoint; its URI becomes the version's artifact URI.
            verdict: The gate's decision about this very model: it says whether the version is promoted, its reasons describe the version, and the champion it names must still be the one that is replaced.
            model_id: Model in the registry; its first version creates it.
            serving_image: Image that serves the model on an endpoint; it is run as vLLM.
            display_name: Name that the console shows. Empty: model_id.
            description: Free text for the console.
            run_name: Name of the run; the version is labelled with it, and a retry finds its version by it.
            project: Project of the registry.
            location: Location of the registry.
            registered: The version.
            resource_name: projects/P/locations/L/models/M@VERSION
            version_id: Version number, as a string.
            aliases: Aliases of the version, separated by commas.
        """
        return launcher_spec(image, "register_model")

    return dsl.container_component(register_model)
