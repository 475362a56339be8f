"""Component `fingerprint`: what state the source is in. Never cached, so that staging can be."""
# ruff: noqa: ARG001 # kfp reads the signature; the launcher reads the executor input

from typing import Any

from kfp import dsl

from penstock_components.container import launcher_spec


def fingerprint(image: str) -> Any:
    """The component, running in `image` (the components image)."""

    def fingerprint(
        source_uri: str,
        fingerprint: dsl.OutputPath(str),  # type: ignore[valid-type]  # kfp reads the call
    ) -> dsl.ContainerSpec:
        """Identify the objects of the source by name, generation, checksum and size.

        Args:
            source_uri: gs:// URI of one object, of a prefix that ends in a slash, or a pattern with * in the name.
            fingerprint: SHA-256 over the objects; pass it to stage_data, whose cache key it becomes.
        """
        return launcher_spec(image, "fingerprint")

    return dsl.container_component(fingerprint)
