"""Runs whose state is one matrix and its moments, all filled with the step."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distributed.tiny_run import tiny_config
from penstock_trainer.checkpoints.checkpointer import Checkpointer
from penstock_trainer.checkpoints.ownership import take_ownership
from penstock_trainer.checkpoints.progress import Progress
from penstock_trainer.checkpoints.restore import Restorer
from penstock_trainer.contract.checkpoint import Manifest, Owner
from penstock_trainer.storage import FileStorage
from penstock_trainer.world import World


class Run:
    """Attempts on one checkpoint root whose state is one matrix and one moment, both filled with the step."""

    def __init__(self, root: Path, world: World, *, resume_from: str = "") -> None:
        self.root = root
        self.tokenizer_sha256 = "ab" * 32
        self._world = world
        config = tiny_config("file:///data", root.as_uri())
        self.config = replace(config, checkpoint=replace(config.checkpoint, resume_from=resume_from))

    def attempt(self) -> Owner:
        """A new owner of the root."""
        return take_ownership(self.root.as_uri(), FileStorage())

    def checkpointer(self, owner: Owner, like: dict[str, Any] | None = None) -> closing[Checkpointer]:
        """Of one attempt, to be closed."""
        return closing(
            Checkpointer(
                self.root.as_uri(),
                owner,
                self.config,
                self._world,
                like or state(0.0),
                tokenizer_sha256=self.tokenizer_sha256,
            )
        )

    def save(self, owner: Owner, *steps: int) -> None:
        """Save steps, and wait until each is a checkpoint."""
        with self.checkpointer(owner) as checkpoints:
            for step in steps:
                checkpoints.save(progress_at(step), state(float(step)))
                assert checkpoints.finish()

    def restorer(self, storage: FileStorage | None = None) -> Restorer:
        return Restorer(
            self.root.as_uri(),
            self.config,
            self._world,
            tokenizer_sha256=self.tokenizer_sha256,
            storage=storage,
        )

    def restored(self) -> tuple[int | None, float]:
        """(step, value) that a new attempt continues from."""
        found = state(-1.0)
        progress = self.restorer().restore(found)
        values = [found["model"]["weight"], *found["opt"]["state"]["weight"].values()]
        assert len({float(value.min()) for value in values} | {float(value.max()) for value in values}) == 1
        if progress is not None:
            assert (progress.samples_seen, progress.tokens_seen) == (12 * progress.step, 384 * progress.step)
        return (progress.step if progress else None), float(values[0].max())

    def manifest(self, step: int) -> Manifest:
        return Manifest.from_json(self.manifest_path(step).read_bytes())

    def manifest_path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}" / "manifest.json"

    def objects(self, step: int) -> dict[str, Path]:
        """Paths of a step's objects by their last name."""
        names = [entry.name for entry in self.manifest(step).objects]
        return {Path(name).name: self.root / f"step-{step:08d}" / name for name in names}


def progress_at(step: int) -> Progress:
    return Progress(step=step, samples_seen=12 * step, tokens_seen=384 * step)


def state(value: float) -> dict[str, Any]:
    matrix = torch.full((3, 5), value)
    moment = {
        "step": torch.tensor(value),
        "exp_avg": torch.full((3, 5), value),
        "exp_avg_sq": torch.full((3, 5), value),
    }
    return {"model": {"weight": matrix}, "opt": {"state": {"weight": moment}}}
