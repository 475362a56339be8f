"""What rules know beside the spec itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Where a spec comes from and goes to."""

    location: str = ""
    """Region of the job; empty where it is not known, and rules about regions say nothing."""
    strategy: str = ""
    """`engine.strategy` of the trainer that the job runs, such as zero2; empty for other programs."""
    through_gcpc: bool = False
    """Whether CustomTrainingJobOp carries it: it drops empty pools and has not every field."""
    unknown: frozenset[str] = frozenset()
    """Fields of the job spec that are decided while a pipeline runs (`network`, `scheduling.strategy`): what a message holds
    there says nothing, and no rule may judge by it."""

    def knows(self, *paths: str) -> bool:
        """Whether all these fields of the job spec, with what holds them and what they hold, are decided already."""
        return not any(
            _is_within(path, each) or _is_within(each, path) for path in paths for each in self.unknown
        )

    def is_later(self, path: str) -> bool:
        """Whether the field at `path` is decided while a pipeline runs, or stands below one that is."""
        return any(_is_within(path, each) for each in self.unknown)


def _is_within(path: str, holder: str) -> bool:
    return path == holder or path.startswith((f"{holder}.", f"{holder}["))
