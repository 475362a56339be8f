"""Component `gate`: whether a model is registered, and whether it becomes the champion."""
# ruff: noqa: ARG001 # kfp reads the signature; the launcher reads the executor input

from typing import Any

from kfp import dsl

from penstock_components.container import launcher_spec


def gate(image: str) -> Any:
    """The component, running in `image` (the components image)."""

    def gate(
        evaluation: dsl.Input[dsl.Artifact],
        verdict: dsl.Output[dsl.Artifact],
        register: dsl.OutputPath(bool),  # type: ignore[valid-type]  # kfp reads the call
        promote: dsl.OutputPath(bool),  # type: ignore[valid-type]  # kfp reads the call
        min_improvement_over_unigram: float = 0.0,
        max_bits_per_byte: float = 0.0,
        min_improvement_over_champion: float = 0.0,
    ) -> dsl.ContainerSpec:
        """Compare the scores with the floors and with the champion. A refusal is a result, not a failure.

        Args:
            evaluation: The scores, from evaluate.
            min_improvement_over_unigram: Share by which the bits per byte must be below the unigram baseline's, or more; 0.1 is ten percent.
            max_bits_per_byte: Most bits per byte that a registered model may have. 0: no such floor.
            min_improvement_over_champion: Share by which the bits per byte must be below the champion's, and more; at 0 an equal model does not win.
            verdict: The decision with its reasons, as JSON.
            register: The floors are passed.
            promote: The floors are passed, and the champion is beaten or there is none.
        """
        return launcher_spec(image, "gate")

    return dsl.container_component(gate)
