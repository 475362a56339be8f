"""Two jobs that were pointed at one checkpoint root: real launchers and ranks."""

from __future__ import annotations

import re
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import step_events, tiny_config
from penstock_trainer.checkpoint_root import CheckpointRoot, verify
from penstock_trainer.contract.checkpoint import Owner, owner_uri
from penstock_trainer.contract.config import JobConfig
from penstock_trainer.storage import FileStorage
from penstock_trainer.testing import ChildProcess, cluster_environs

TIMEOUT_SECONDS = 120.0


def test_the_older_of_two_jobs_is_fenced_and_ends_with_an_error_and_nothing_interleaves(
    tmp_path: Path,
) -> None:
    root = CheckpointRoot((tmp_path / "root").as_uri())
    config = tiny_config(build_dataset(tmp_path / "dataset"), root.uri, steps=100_000)
    config = replace(config, checkpoint=replace(config.checkpoint, interval=10, keep_last=0))

    with ExitStack() as stack:
        older = stack.enter_context(job(config))
        wait_for_saves(root, 2, older)
        newer = stack.enter_context(job(replace(config, steps=max(root.steps()) + 200)))
        assert older.wait(TIMEOUT_SECONDS) == 1, older.stderr
        assert newer.wait(TIMEOUT_SECONDS) == 0, newer.stderr
        old_steps, new_steps = step_events(older.stdout), step_events(newer.stdout)
        old_log, new_log = older.stderr, newer.stderr

    owner = Owner.from_json(FileStorage().read(owner_uri(root.uri)))
    assert re.search(
        rf"FencedError: .* belongs to attempt {owner.attempt} with fencing token 2 by now", old_log
    )
    assert not re.search(r"restart \d+ of", old_log), "it would only take the root back"
    [resumed] = re.findall(r"continuing from step (\d+) of", new_log)
    assert new_steps[0].step == int(resumed) + 1 > 10
    assert new_steps[0].step <= old_steps[-1].step + 1

    manifests = list(root.whole_steps())
    assert len(manifests) == len(root.steps()) - len(unfinished(root))
    for manifest in manifests:
        assert verify(root, manifest.step) == []
        assert {entry.name.partition("/")[0] for entry in manifest.objects} == {manifest.attempt}
        is_of_newer = manifest.attempt == owner.attempt
        assert manifest.fencing_token == (2 if is_of_newer else 1)
        if manifest.step > int(resumed) + 10:
            assert is_of_newer, "the save that was under way is the older job's last"


def job(config: JobConfig) -> ChildProcess:
    return ChildProcess(
        [sys.executable, "-m", "penstock_trainer", f"--config={config.to_json()}"], cluster_environs(1)[0]
    )


def wait_for_saves(root: CheckpointRoot, count: int, process: ChildProcess) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(re.findall(r"saved step \d+ to", process.stderr)) < count:
        assert time.monotonic() < deadline, process.stderr
        time.sleep(0.01)


def unfinished(root: CheckpointRoot) -> list[int]:
    """Steps that the fenced job had begun to write."""
    return [step for step in root.steps() if root.state(step).condition == "not committed"]
