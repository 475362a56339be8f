"""Manifests and events: what one side writes the other reads, and nothing else passes."""

from __future__ import annotations

import json

import pytest

from penstock_trainer.contract.checkpoint import (
    CheckpointObject,
    Manifest,
    Owner,
    manifest_uri,
    owner_uri,
    step_dir_uri,
    step_of,
)
from penstock_trainer.contract.dataset import DatasetManifest, DatasetObject, TokenizerInfo, token_type_for
from penstock_trainer.contract.events import (
    EvaluationEvent,
    ProgressEvent,
    StepEvent,
    measurements_from_jsonl,
    measurements_to_jsonl,
    parse_event,
)
from penstock_trainer.contract.export import ExportManifest
from penstock_trainer.contract.fields import ContractError

OBJECT = CheckpointObject(name="a/index.json", generation=1, size=2, crc32c="AAAAAA==", sha256="00")
MANIFEST = Manifest(
    format_version=1,
    step=100,
    samples_seen=1600,
    tokens_seen=409600,
    config={"steps": 200},
    config_hash="0123456789abcdef",
    tokenizer_sha256="ab" * 32,
    strategy="zero2",
    world_size=2,
    versions={"torch": "2.13.0"},
    attempt="a",
    fencing_token=3,
    index="a/index.json",
    objects=(OBJECT,),
)
SHARD = DatasetObject(
    name="train/shard-00000.tokens", size=2, crc32c="AAAAAA==", documents=1, tokens=1, text_bytes=1
)
DATASET = DatasetManifest(
    format_version=1,
    token_type="uint16",
    tokenizer=TokenizerInfo(sha256="ab" * 32, vocab_size=320, eos_id=0),
    train=(SHARD,),
    evaluation=(),
    token_counts=SHARD,
    sources=(),
    filters={},
)
EXPORT = ExportManifest(
    format_version=1,
    step=100,
    tokens_seen=409600,
    num_parameters=9,
    config={"steps": 200},
    config_hash="0123456789abcdef",
    dataset_uri="gs://b/d",
    world_size=2,
    attempt="a",
    checkpoint_uri="gs://b/ck/step-00000100",
    objects=(OBJECT,),
)
STEP = StepEvent(step=1, steps=2, loss=3.5, learning_rate=0.1, grad_norm=1.0, tokens_per_second=10.0)
EVALUATION = EvaluationEvent(step=1, loss=3.0, accuracy=0.5, targets=4, best=True, seconds=0.1)


def test_a_checkpoint_manifest_comes_back() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 3}, "checkpoint format 3 is not known here"),
        ({"index": "other"}, "one of the objects"),
        ({"tokenizer_sha256": None}, "tokenizer_sha256 = None is not valid: it must be a string"),
        ({"stap": 1}, "Did you mean 'step'"),
        ({"step": "100"}, "whole number"),
    ],
)
def test_a_manifest_of_another_shape_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        Manifest.from_json(json.dumps(json.loads(MANIFEST.to_json()) | change))


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe", "[]"])
def test_what_is_not_a_manifest_is_refused(text: str | bytes) -> None:
    for parse in (Manifest.from_json, Owner.from_json, DatasetManifest.from_json):
        with pytest.raises(ContractError):
            parse(text)


def test_the_layout_of_a_root() -> None:
    assert step_dir_uri("gs://b/ck/", 100) == "gs://b/ck/step-00000100"
    assert manifest_uri("gs://b/ck", 100) == "gs://b/ck/step-00000100/manifest.json"
    assert owner_uri("gs://b/ck/") == "gs://b/ck/owner.json"
    assert step_of("gs://b/ck/step-00000100/") == 100
    assert step_of("gs://b/ck/metrics") is None


def test_the_narrowest_token_type_is_chosen() -> None:
    assert token_type_for(65536) == "uint16"
    assert token_type_for(65537) == "uint32"


def test_an_event_survives_cloud_logging_which_makes_every_number_a_double() -> None:
    payload = json.loads(STEP.to_line()) | {"step": 1.0, "steps": 2.0}
    assert parse_event(payload) == STEP
    assert isinstance(parse_event(payload).step, int)
    assert parse_event(STEP.to_line()) == STEP
    assert parse_event(EVALUATION.to_line()) == EVALUATION
    progress = ProgressEvent(done=1, total=2, unit="documents")
    assert parse_event(progress.to_line()) == progress


@pytest.mark.parametrize("payload", ["plain text", "{broken", {"event": "step"}, {"event": "other"}, None, 3])
def test_any_other_line_is_no_event(payload: object) -> None:
    assert parse_event(payload) is None


def test_what_was_measured_comes_back_from_its_file() -> None:
    measured = [STEP, STEP, EVALUATION]
    assert measurements_from_jsonl(measurements_to_jsonl(measured)) == measured


def test_a_line_of_a_logged_step_is_what_it_was_before_there_were_evaluations() -> None:
    [step, evaluation] = map(json.loads, measurements_to_jsonl([STEP, EVALUATION]).splitlines())
    assert "event" not in step
    assert evaluation["event"] == "evaluation"


@pytest.mark.parametrize("line", [b'{"step": 1}', b'{"step": ', b"", b"\xff", b"[]"])
def test_a_line_that_was_not_measured_is_told_by_its_number(line: bytes) -> None:
    with pytest.raises(ContractError):
        measurements_from_jsonl(line + b"\n")
    with pytest.raises(ContractError, match="line 2 of the measurements is not JSON"):
        measurements_from_jsonl(measurements_to_jsonl([STEP]) + b"{\n")


@pytest.mark.parametrize(
    ("kind", "text"), [(DatasetManifest, DATASET.to_json()), (ExportManifest, EXPORT.to_json())]
)
def test_manifests_of_another_version_are_refused(
    kind: type[DatasetManifest | ExportManifest], text: str
) -> None:
    assert kind.from_json(text).to_json() == text
    with pytest.raises(ContractError, match=r"format 2 is not known here \(this version reads 1\); "):
        kind.from_json(json.dumps(json.loads(text) | {"format_version": 2}))
