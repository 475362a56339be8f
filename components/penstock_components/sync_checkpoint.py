"""Component `sync_checkpoint`: what training left in its directory becomes artifacts of the pipeline."""
# ruff: noqa: ARG001 # kfp reads the signature; the launcher reads the executor input

from typing import Any

from kfp import dsl

from penstock_components.container import launcher_spec


def sync_checkpoint(image: str) -> Any:
    """The component, running in `image` (the components image)."""

    def sync_checkpoint(
        gcp_resources: str,
        train_directory: str,
        model: dsl.Output[dsl.Model],
        checkpoint: dsl.Output[dsl.Artifact],
        model_uri: dsl.OutputPath(str),  # type: ignore[valid-type]  # kfp reads the call
        destination: str = "",
        run_name: str = "",
    ) -> dsl.ContainerSpec:
        """Copy the exported model and the newest complete checkpoint of a training job, verified.

        Args:
            gcp_resources: Output of the train task; it names the CustomJob, and makes this task wait for it.
            train_directory: gs:// URI that was the train task's base_output_directory.
            model: The export: safetensors, Hugging Face config, tokenizer, metrics and manifest.
            checkpoint: A checkpoint root with one step, which a later run can resume from.
            model_uri: URI of the model, as a string.
            destination: gs:// directory in a second bucket or region that gets a copy of both besides the artifacts, as
                `checkpoints/` and `model/`. Empty: none.
            run_name: Directory below the destination, so that runs do not overwrite each other's.
        """
        return launcher_spec(image, "sync_checkpoint")

    return dsl.container_component(sync_checkpoint)
