"""The images that a pipeline runs, as values: they come from penstock.toml or flags and are fixed at compile time."""

from __future__ import annotations

from dataclasses import dataclass


class ImageError(ValueError):
    """An image that a compiled pipeline must not name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """One image for each role."""

    components: str
    """Runs the launchers: staging, syncing, gate, registry. Ours."""
    trainer: str
    """Runs training and evaluation. Ours."""
    serving: str
    """Container of the registered model. Google's or yours; it may keep a tag."""

    def require_digests(self) -> None:
        """Raise ImageError unless both of our images are pinned: a tag can mean another image at the next run."""
        for role in ("components", "trainer"):
            image = getattr(self, role)
            if "@sha256:" not in image:
                raise ImageError(
                    f"the {role} image {image!r} has no digest. Give {image.partition(':')[0]}@sha256:..., as "
                    "`docker push` prints it, or allow tags with --allow-tags (or allow_tags = true in penstock.toml)."
                )
