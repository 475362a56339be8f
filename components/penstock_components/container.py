"""How a definition runs its launcher. Part of the definitions: it imports kfp."""

from kfp import dsl

PROJECT = "{{$.pipeline_google_cloud_project_id}}"
"""Stands for the project that the pipeline runs in."""
LOCATION = "{{$.pipeline_google_cloud_location}}"
"""Stands for the location that the pipeline runs in."""


def launcher_spec(image: str, name: str) -> dsl.ContainerSpec:
    """The container that runs `penstock_components.launchers.<name>` on the task's whole executor input.

    All inputs travel in that one JSON text: spliced one by one into arguments, values would not be escaped.
    """
    return dsl.ContainerSpec(
        image=image,
        command=["python", "-m", f"penstock_components.launchers.{name}"],
        args=["--executor-input", dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER],
    )
