"""The trainer under its own launcher, on two nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import LOSS_TOLERANCE, reference_losses, step_events, tiny_config
from penstock_trainer.contract.checkpoint import Manifest, Owner, manifest_uri, owner_uri
from penstock_trainer.contract.export import ExportManifest
from penstock_trainer.storage import FileStorage
from penstock_trainer.testing import run_cluster


def test_two_nodes_train_export_and_share_the_launchers_attempt(tmp_path: Path) -> None:
    root_uri, model_uri = (tmp_path / "checkpoints").as_uri(), (tmp_path / "model").as_uri()
    config = tiny_config(build_dataset(tmp_path / "dataset"))
    command = [sys.executable, "-m", "penstock_trainer", f"--config={config.to_json()}"]
    env = {"AIP_CHECKPOINT_DIR": root_uri, "AIP_MODEL_DIR": model_uri}

    nodes = run_cluster([command] * 2, env=env, timeout_seconds=120.0)

    assert [node.returncode for node in nodes] == [0, 0], nodes[0].stderr
    losses = [event.loss for event in step_events(nodes[0].stdout)]
    assert losses == pytest.approx(reference_losses(tmp_path / "dataset", config), abs=LOSS_TOLERANCE)
    assert step_events(nodes[1].stdout) == []
    storage = FileStorage()
    owner = Owner.from_json(storage.read(owner_uri(root_uri)))
    manifest = Manifest.from_json(storage.read(manifest_uri(root_uri, config.steps)))
    assert (manifest.attempt, manifest.fencing_token, manifest.world_size) == (owner.attempt, 1, 2)
    assert {Path(entry.name).name for entry in manifest.objects} == {"0-0.distcp", "1-0.distcp", "index.json"}
    exported = ExportManifest.from_json(storage.read(f"{model_uri}/manifest.json"))
    assert (exported.attempt, exported.step) == (owner.attempt, config.steps)
