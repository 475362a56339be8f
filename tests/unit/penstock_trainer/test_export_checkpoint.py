"""An export of a checkpoint, made without the run that saved it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from compiled import ROOT
from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import tiny_config
from made_checkpoints import commit, fixture_root, save
from penstock_trainer.checkpoint_root import CheckpointRoot
from penstock_trainer.contract.checkpoint import Owner, step_dir_uri
from penstock_trainer.contract.events import StepEvent, measurements_from_jsonl
from penstock_trainer.contract.export import ExportManifest
from penstock_trainer.errors import CheckpointError, DatasetError, ExportError
from penstock_trainer.export import read_export
from penstock_trainer.export_checkpoint import export_checkpoint
from penstock_trainer.metrics import MetricsLog
from penstock_trainer.storage import ObjectCorruptError, join
from penstock_trainer.testing import run_cluster

DATASET = ROOT / "tests/distributed/formats/format-1/dataset"


@pytest.fixture(params=["fsdp-full", "zero1"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointRoot:
    """Step 3 of a run on two ranks."""
    return fixture_root(tmp_path, request.param)


def export(root: CheckpointRoot, directory: Path, **how: Any) -> Path:
    export_checkpoint(root, 3, (directory / "model").as_uri(), **{"data_uri": DATASET.as_uri(), **how})
    return directory / "model"


def stored(root: CheckpointRoot, name: str) -> torch.Tensor:
    """A float32 matrix of the checkpoint, put together by hand."""
    directory = step_dir_uri(root.uri, 3)
    told = json.loads(root.storage.read(join(directory, root.manifest(3).index)))["tensors"][name]
    whole = torch.full(told["shape"], torch.nan)
    for chunk in told["chunks"]:
        uri = join(directory, chunk["object"])
        data = root.storage.read(uri, start=chunk["byte_offset"], length=chunk["length"])
        (row, column), (height, width) = chunk["offsets"], chunk["sizes"]
        box = torch.frombuffer(bytearray(data), dtype=torch.float32).view(height, width)
        whole[row : row + height, column : column + width] = box
    return whole


def test_it_is_a_hugging_face_model_with_the_weights_of_the_checkpoint(
    root: CheckpointRoot, tmp_path: Path
) -> None:
    directory = export(root, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert torch.equal(model.lm_head.weight.detach(), stored(root, "model.lm_head.weight"))
    query = model.model.layers[1].self_attn.q_proj.weight.detach()
    assert torch.equal(query, stored(root, "model.layers.1.self_attn.q_proj.weight"))
    manifest = ExportManifest.from_json((directory / "manifest.json").read_bytes())
    assert (manifest.step, manifest.tokens_seen, manifest.world_size) == (3, 1152, 2)
    assert manifest.attempt == root.manifest(3).attempt
    assert manifest.checkpoint_uri == step_dir_uri(root.uri, 3)
    assert manifest.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_it_is_read_as_what_the_trainer_exports(root: CheckpointRoot, tmp_path: Path) -> None:
    read = read_export(export(root, tmp_path).as_uri())
    assert read.text is not None
    assert read.text.seq_len == 32
    assert (tmp_path / "model/tokenizer.json").read_bytes() == (DATASET / "tokenizer.json").read_bytes()


def test_its_metrics_end_with_its_step(root: CheckpointRoot, tmp_path: Path) -> None:
    owner = Owner(attempt="a1", fencing_token=1)
    log = MetricsLog(root.storage, root.uri, owner, resumed_from=0)
    for step in range(1, 6):
        log.record(
            StepEvent(step=step, steps=6, loss=1.0, learning_rate=1.0, grad_norm=1.0, tokens_per_second=1.0)
        )
    log.upload(log.recorded)
    lines = (export(root, tmp_path) / "metrics.jsonl").read_bytes()
    assert [event.step for event in measurements_from_jsonl(lines)] == [1, 2, 3]


def test_an_export_that_stands_there_is_replaced_only_when_told(root: CheckpointRoot, tmp_path: Path) -> None:
    before = (export(root, tmp_path) / "manifest.json").stat().st_mtime_ns
    with pytest.raises(ExportError, match=r"there is an export at .* already\. Give --replace"):
        export(root, tmp_path)
    assert (tmp_path / "model/manifest.json").stat().st_mtime_ns == before
    export(root, tmp_path, replace=True)
    assert (tmp_path / "model/manifest.json").stat().st_mtime_ns != before


def test_a_dataset_that_is_gone_or_another_is_told_and_nothing_is_written(
    root: CheckpointRoot, tmp_path: Path
) -> None:
    with pytest.raises(DatasetError, match="say with --data where it lies now"):
        export(root, tmp_path, data_uri=(tmp_path / "nothing").as_uri())
    standing = root.manifest(3)
    objects = sorted(standing.objects, key=lambda entry: entry.name == standing.index)
    commit(root, 3, tuple(objects), attempt="a1", tokenizer_sha256="0" * 64, config=standing.config)
    with pytest.raises(DatasetError, match="has another tokenizer than the checkpoint was trained with"):
        export(root, tmp_path)
    assert not (tmp_path / "model").exists()


def test_a_checkpoint_that_is_damaged_or_not_of_its_model_is_refused(
    root: CheckpointRoot, tmp_path: Path
) -> None:
    standing = root.manifest(3)
    other = save(root, 3, config=standing.config, tokenizer_sha256=standing.tokenizer_sha256)
    with pytest.raises(CheckpointError, match="cannot be read into its model"):
        export(root, tmp_path)
    root.storage.write(join(step_dir_uri(root.uri, 3), other.objects[0].name), b"short")
    with pytest.raises(ObjectCorruptError, match="is not the object that was written"):
        export(root, tmp_path)
    assert not (tmp_path / "model").exists()


def test_of_the_last_step_it_is_what_the_run_itself_has_exported(tmp_path: Path) -> None:
    root_uri, theirs = (tmp_path / "checkpoints").as_uri(), tmp_path / "theirs"
    config = tiny_config(build_dataset(tmp_path / "data"), root_uri, strategy="zero2", processes_per_node=2)
    command = [sys.executable, "-m", "penstock_trainer", f"--config={config.to_json()}"]
    [node] = run_cluster([command], env={"AIP_MODEL_DIR": theirs.as_uri()})
    assert node.returncode == 0, node.stderr
    export_checkpoint(CheckpointRoot(root_uri), config.steps, (tmp_path / "ours").as_uri())
    files = sorted(path.name for path in theirs.iterdir())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == files
    for name in set(files) - {"manifest.json"}:
        assert (tmp_path / "ours" / name).read_bytes() == (theirs / name).read_bytes(), name
    ours, other = (
        replace(ExportManifest.from_json((directory / "manifest.json").read_bytes()), objects=())
        for directory in (tmp_path / "ours", theirs)
    )
    assert ours == other
