"""Component `evaluate`: challenger and champion on the same held-out documents, in bits per byte."""
# ruff: noqa: ARG001 # kfp reads the signature; the launcher reads the executor input

from typing import Any

from kfp import dsl

from penstock_components.container import LOCATION, PROJECT, launcher_spec


def evaluate(image: str) -> Any:
    """The component, running in `image` (the trainer image: it needs torch)."""

    def evaluate(
        model: dsl.Input[dsl.Model],
        dataset_uri: str,
        model_id: str,
        metrics: dsl.Output[dsl.Metrics],
        report: dsl.Output[dsl.HTML],
        evaluation: dsl.Output[dsl.Artifact],
        max_bytes: int = 0,
        project: str = PROJECT,
        location: str = LOCATION,
    ) -> dsl.ContainerSpec:
        """Score a model beside the registry's champion and the unigram baseline.

        Args:
            model: The export to score, from sync_checkpoint.
            dataset_uri: URI of the dataset whose held-out documents are scored, from stage_data.
            model_id: Model in the registry whose version with the alias champion is scored too, if there is one.
            max_bytes: Most bytes of held-out text to score. 0: all of it.
            project: Project of the registry.
            location: Location of the registry.
            metrics: Bits per byte, loss and perplexity, with the baseline's and the champion's.
            report: The run on one page: loss curve, scores, configuration, data, versions.
            evaluation: The scores as JSON, for the gate.
        """
        return launcher_spec(image, "evaluate")

    return dsl.container_component(evaluate)
