"""Component `record_status`: exit task that leaves the run's end state in the pipeline root."""
# ruff: noqa: ARG001 # kfp reads the signature; the launcher reads the executor input

from typing import Any

from kfp import dsl

from penstock_components.container import launcher_spec


def record_status(image: str) -> Any:
    """The component, running in `image` (the components image). Use it as the exit task of a dsl.ExitHandler."""

    def record_status(
        status: dsl.PipelineTaskFinalStatus,
        pipeline_root: str = dsl.PIPELINE_ROOT_PLACEHOLDER,
        run_name: str = dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
    ) -> dsl.ContainerSpec:
        """Write <pipeline_root>/<run_name>/status.json, whatever became of the run.

        Args:
            status: How the run ended; the backend gives it.
            pipeline_root: gs:// URI of the pipeline root.
            run_name: Name of the run.
        """
        return launcher_spec(image, "record_status")

    return dsl.container_component(record_status)
