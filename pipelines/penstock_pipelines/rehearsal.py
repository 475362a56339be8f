"""A recipe run twice on the stand-in, once undisturbed and once with faults, and what tells the two apart."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock_pipelines.display import display_for
from penstock_pipelines.errors import ServiceError
from penstock_pipelines.fault_evidence import Evidence, Row, Saved, judge, lines_of, losses_of
from penstock_pipelines.faults import FaultControl, OrderedFault
from penstock_pipelines.follow import Follower, failed_replica
from penstock_pipelines.parameters import PipelineParameters
from penstock_pipelines.settings import Settings
from penstock_pipelines.submit import RUN_LABEL, Submission, submit
from penstock_trainer.checkpoint_root import CheckpointRoot
from penstock_trainer.contract.checkpoint import Manifest
from penstock_trainer.contract.fields import canonical_json
from penstock_trainer.storage import StorageError, join

_SUCCEEDED = "SUCCEEDED"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """What a rehearsal came to."""

    clean_run: str
    run: str
    state: str
    """Of the disturbed run."""
    rows: Sequence[Row]

    @property
    def ok(self) -> bool:
        """Whether everything is as it must be."""
        return all(row.ok for row in self.rows)


@dataclass(kw_only=True)
class Rehearsal:
    """Runs of one compiled pipeline with the same parameters."""

    compiled: Path
    parameters: Mapping[str, Any]
    settings: Settings
    console: Console
    control: FaultControl
    _sdk: Any = field(init=False)

    def __post_init__(self) -> None:
        from google.cloud import aiplatform

        aiplatform.init(project=self.settings.project, location=self.settings.location)
        self._sdk = aiplatform

    def run(self, faults: tuple[OrderedFault, ...], source: Path, run_id: str | None) -> Rehearsed:
        """Both runs to their ends. The order goes first: what is wrong with it is told before anything runs.

        A clean run of the same file and parameters that is there already is used again. Raises InputError and
        ServiceError; KeyboardInterrupt cancels the run and passes through.
        """
        run_id = run_id or f"faults-{self._hash}-{time.strftime('%H%M%S')}"
        labels = {RUN_LABEL: run_id}
        self.control.arm(faults, labels=labels, source=source)
        clean = self._clean()
        self.console.print(f"run with faults: {run_id}", highlight=False)
        disturbed = self._followed(run_id)
        evidence = self._evidence(clean, disturbed)
        rows = judge(faults, self.control.states(labels), evidence)
        return Rehearsed(clean_run=clean.view.run_id, run=run_id, state=disturbed.view.state, rows=rows)

    @property
    def _hash(self) -> str:
        """Of what decides what a run computes."""
        told = canonical_json(dict(self.parameters)).encode()
        return hashlib.sha256(self.compiled.read_bytes() + told).hexdigest()[:10]

    def _clean(self) -> Follower:
        from google.api_core import exceptions

        for attempt in range(100):
            run_id = f"clean-{self._hash}" + (f"-{attempt}" if attempt else "")
            try:
                standing = self._sdk.PipelineJob.get(run_id)
            except exceptions.NotFound:
                self.console.print(f"clean run: {run_id}", highlight=False)
                return self._required(self._followed(run_id))
            follower = Follower(standing, project=self.settings.project)
            follower.refresh()
            if follower.view.state == _SUCCEEDED:
                self.console.print(f"clean run: {run_id}, which is there already", highlight=False)
                return follower
        raise ServiceError("a hundred clean runs of this recipe have failed; see `penstock status`.")

    def _required(self, follower: Follower) -> Follower:
        if follower.view.state != _SUCCEEDED:
            raise ServiceError(
                f"the clean run {follower.view.run_id} did not succeed, so there is nothing to compare with: "
                f"{follower.view.error or follower.view.state}. See `penstock status {follower.view.run_id}`."
            )
        return follower

    def _followed(self, run_id: str) -> Follower:
        submission = Submission(compiled=self.compiled, run_id=run_id, parameters=self.parameters)
        follower = Follower(submit(submission, self.settings), project=self.settings.project)
        with display_for(self.console) as display:
            try:
                follower.follow(display)
            except KeyboardInterrupt:
                self.console.print("cancelling ...")
                follower.cancel(display)
                raise
        return follower

    def _evidence(self, clean: Follower, disturbed: Follower) -> Evidence:
        clean_job, job = clean.custom_job(), disturbed.custom_job()
        if clean_job is None or job is None:
            raise ServiceError(
                f"{(disturbed if job is None else clean).view.run_id} ended before it had a training job: "
                f"{disturbed.view.error}"
            )
        root = join(self.settings.pipeline_root, disturbed.view.run_id, "train", "checkpoints")
        return Evidence(
            lines=lines_of(disturbed.replica_lines(job)),
            clean_losses=losses_of(lines_of(clean.replica_lines(clean_job))),
            saved=tuple(saved_below(CheckpointRoot(root))),
            succeeded=disturbed.view.state == _SUCCEEDED,
            error=failed_replica(job) or disturbed.view.error,
        )


def saved_below(root: CheckpointRoot) -> Iterator[Saved]:
    """The step directories that have, or had, a manifest. Raises ServiceError."""
    try:
        for step in root.steps():
            state = root.state(step)
            if state.condition != "not committed":
                yield _saved(step, state.manifest, is_whole=state.condition == "whole")
    except StorageError as exc:
        raise ServiceError(f"the run's checkpoints cannot be looked at: {exc}") from exc


def _saved(step: int, manifest: Manifest | None, *, is_whole: bool) -> Saved:
    config = manifest.config if manifest else {}
    return Saved(
        step=step,
        is_whole=is_whole,
        samples_seen=manifest.samples_seen if manifest else 0,
        expected_samples=step * int(config.get("global_batch", 0)),
        keep_last=int(config.get("checkpoint", {}).get("keep_last", 0)),
    )


def parameters_of(compiled: Path, given: Sequence[str], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Values of the run time parameters. Raises InputError."""
    return PipelineParameters(compiled).values(given, defaults)
