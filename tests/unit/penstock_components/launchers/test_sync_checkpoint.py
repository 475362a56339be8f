"""What training left behind becomes artifacts."""

import dataclasses
import hashlib
import json

import pytest

from penstock_components.launchers import sync_checkpoint
from penstock_trainer.checkpoint_root import CheckpointRoot
from penstock_trainer.contract.checkpoint import CheckpointObject, Manifest
from penstock_trainer.contract.events import ProgressEvent, parse_event
from penstock_trainer.contract.export import ExportManifest
from penstock_trainer.storage import storage_for

JOB = "https://europe-west4-aiplatform.googleapis.com/v1/projects/1/locations/europe-west4/customJobs/7"
RESOURCES = json.dumps({"resources": [{"resourceType": "CustomJob", "resourceUri": JOB}]})
PLACES = {"outputs": ["model", "checkpoint"], "returns": ["model_uri"]}


def written(bed, directory, names):
    """Objects below `directory`, as a manifest names them."""
    entries = []
    for name in names:
        data = f"{directory}/{name}".encode() * 100
        info = storage_for("file://").write(bed.uri(directory, name), data)
        digest = hashlib.sha256(data).hexdigest()
        entries.append(
            CheckpointObject(
                name=name, generation=info.generation, size=info.size, crc32c=info.crc32c, sha256=digest
            )
        )
    return tuple(entries)


def save_checkpoint(bed, step):
    directory = f"train/checkpoints/step-{step:08d}"
    manifest = Manifest(
        format_version=1, step=step, samples_seen=step, tokens_seen=step * 64, config={}, config_hash="c0ffee",
        tokenizer_sha256="ab" * 32, strategy="zero2", world_size=4, versions={"torch": "2.13"}, attempt="a1", fencing_token=2,
        index="a1/index.json", objects=written(bed, directory, [*(f"a1/{rank}.distcp" for rank in range(4)), "a1/index.json"]),
    )  # fmt: skip
    bed.write(f"{directory}/manifest.json", manifest.to_json())
    return manifest


@pytest.fixture
def trained(bed):
    names = ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "metrics.jsonl"]
    export = ExportManifest(
        format_version=1, step=20, tokens_seen=1280, num_parameters=99, config={}, config_hash="c0ffee",
        dataset_uri="gs://b/d", world_size=4, attempt="a1", checkpoint_uri=bed.uri("train/checkpoints/step-00000020"),
        objects=written(bed, "train/model", names),
    )  # fmt: skip
    bed.write("train/model/manifest.json", export.to_json())
    save_checkpoint(bed, 10)
    save_checkpoint(bed, 20)
    bed.tick()
    return bed


def sync(bed, **change):
    parameters = {"gcp_resources": RESOURCES, "train_directory": bed.uri("train"), **change}
    return bed.run(sync_checkpoint.main, parameters, **PLACES)


def times(bed):
    return {path: path.stat().st_mtime_ns for path in bed.artifact().rglob("*")}


def assert_is_whole(directory, manifest):
    """Every object is there, with the bytes and in the generation that the manifest at the destination names."""
    assert {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()} == {
        "manifest.json",
        *(entry.name for entry in manifest.objects),
    }
    for entry in manifest.objects:
        info = storage_for("file://").stat((directory / entry.name).as_uri())
        assert (info.size, info.crc32c, info.generation) == (entry.size, entry.crc32c, entry.generation)


def synced_checkpoint(bed, step):
    directory = bed.artifact("checkpoint", f"step-{step:08d}")
    return directory, Manifest.from_json((directory / "manifest.json").read_bytes())


def test_the_export_and_the_newest_checkpoint_are_copied_whole(trained):
    assert sync(trained) == 0
    model = trained.artifact("model")
    assert_is_whole(model, ExportManifest.from_json((model / "manifest.json").read_bytes()))
    assert_is_whole(*synced_checkpoint(trained, 20))
    assert [path.name for path in trained.artifact("checkpoint").iterdir()] == ["step-00000020"]


def test_only_the_generations_differ_from_the_original_manifest(trained):
    assert sync(trained) == 0
    original = Manifest.from_json(
        (trained.root / "train/checkpoints/step-00000020/manifest.json").read_bytes()
    )
    _, copied = synced_checkpoint(trained, 20)
    assert all(
        new.generation != old.generation for new, old in zip(copied.objects, original.objects, strict=True)
    )
    generations = [entry.generation for entry in original.objects]
    restored = tuple(
        dataclasses.replace(entry, generation=generation)
        for entry, generation in zip(copied.objects, generations, strict=True)
    )
    assert dataclasses.replace(copied, objects=restored) == original


def test_the_outputs_describe_the_model(trained):
    assert sync(trained) == 0
    assert trained.parameter("model_uri") == trained.uri("artifacts", "model")
    assert trained.metadata("model") == {
        "framework": "pytorch", "step": 20, "tokens_seen": 1280, "num_parameters": 99, "world_size": 4,
    }  # fmt: skip
    assert trained.metadata("checkpoint")["step"] == 20


def test_the_job_that_trained_is_logged(trained, caplog):
    caplog.set_level("INFO")
    assert sync(trained) == 0
    assert f"trained by {JOB}" in caplog.text


def test_a_retry_copies_nothing_twice(trained):
    assert sync(trained) == 0
    before = times(trained)
    trained.tick()
    assert sync(trained) == 0
    assert times(trained) == before


def test_a_retry_copies_only_what_is_missing_or_damaged(trained):
    assert sync(trained) == 0
    before = times(trained)
    trained.tick()
    model = trained.artifact("model")
    (model / "manifest.json").unlink()
    (model / "config.json").unlink()
    (model / "tokenizer.json").write_bytes(b"half")
    assert sync(trained) == 0
    changed = {path.name for path, time in times(trained).items() if before[path] != time and path.is_file()}
    assert changed == {"manifest.json", "config.json", "tokenizer.json"}
    assert_is_whole(model, ExportManifest.from_json((model / "manifest.json").read_bytes()))


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("a1/2.distcp", None, "a1/2.distcp missing or damaged"),
        ("a1/2.distcp", b"short", "a1/2.distcp missing or damaged"),
        ("manifest.json", None, "no manifest"),
        ("manifest.json", b"{}", "format_version"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_passed_over_and_named(trained, caplog, name, damage, told):
    path = trained.root / "train/checkpoints/step-00000020" / name
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    assert sync(trained) == 0
    assert_is_whole(*synced_checkpoint(trained, 10))
    assert "step-00000020 passed over: " in caplog.text
    assert told in caplog.text


def test_without_an_export_the_error_says_what_was_expected_where(trained, capsys):
    (trained.root / "train/model/manifest.json").unlink()
    assert sync(trained) == 1
    error = capsys.readouterr().err
    assert f"there is no export at {trained.uri('train')}/model/manifest.json" in error
    assert "base_output_directory" in error
    assert not trained.has_output()


def test_without_a_whole_checkpoint_the_error_lists_what_is_there(trained, capsys):
    for path in (trained.root / "train/checkpoints").rglob("manifest.json"):
        path.unlink()
    assert sync(trained) == 1
    error = capsys.readouterr().err
    assert f"there is no complete checkpoint under {trained.uri('train')}/checkpoints" in error
    assert "step-00000010" in error


def test_an_export_that_was_damaged_after_training_is_refused(trained, capsys):
    (trained.root / "train/model/model.safetensors").write_bytes(b"other")
    assert sync(trained) == 1
    assert "model.safetensors is gone, or not what its manifest names" in capsys.readouterr().err
    assert not trained.artifact("model", "manifest.json").exists()


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ("", "is not the gcp_resources output"),
        ("[]", "is not the gcp_resources output"),
        ('{"resources": []}', "names no CustomJob"),
        ('{"resources": [{"resourceType": "Model", "resourceUri": "x"}]}', "names no CustomJob"),
    ],
)
def test_gcp_resources_of_something_else_are_refused(trained, capsys, resources, message):
    assert sync(trained, gcp_resources=resources) == 1
    assert message in capsys.readouterr().err


def to_second(bed, name="second", **change):
    return sync(bed, **{"destination": bed.uri(name), "run_name": "run-7", **change})


def test_a_destination_gets_both_besides_the_artifacts_below_the_runs_name(trained):
    assert to_second(trained) == 0
    second = trained.root / "second/run-7"
    assert_is_whole(second / "model", ExportManifest.from_json((second / "model/manifest.json").read_bytes()))
    root = CheckpointRoot((second / "checkpoints").as_uri())
    assert root.steps() == [20]
    assert root.whole(20).config_hash == "c0ffee"
    assert_is_whole(*synced_checkpoint(trained, 20))
    assert trained.parameter("model_uri") == trained.uri("artifacts", "model")
    assert trained.metadata("model")["copy"] == trained.uri("second/run-7/model")
    assert trained.metadata("checkpoint")["copy"] == trained.uri("second/run-7/checkpoints")


def test_runs_that_share_a_destination_do_not_meet(trained):
    assert to_second(trained) == 0
    before = {path: path.read_bytes() for path in (trained.root / "second/run-7").rglob("*.*")}
    assert to_second(trained, run_name="run-8") == 0
    assert {path: path.read_bytes() for path in (trained.root / "second/run-7").rglob("*.*")} == before
    assert (trained.root / "second/run-8/model/manifest.json").exists()


def test_a_sync_that_was_cut_off_copies_only_the_rest_to_the_destination(trained):
    assert to_second(trained) == 0
    directory = trained.root / "second/run-7/checkpoints/step-00000020"
    before = {path.name: path.stat().st_mtime_ns for path in (directory / "a1").iterdir()}
    for name in ("manifest.json", "a1/3.distcp"):
        (directory / name).unlink()
    trained.tick()
    assert to_second(trained) == 0
    after = {path.name: path.stat().st_mtime_ns for path in (directory / "a1").iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"3.distcp"}
    assert_is_whole(directory, Manifest.from_json((directory / "manifest.json").read_bytes()))


@pytest.mark.parametrize(
    ("destination", "run_name", "message"),
    [
        ("gs://other/place", "r", "must be a gs:// directory of another bucket"),
        ("other/place", "r", "must be a gs:// directory of another bucket"),
        ("train", "copy", "neither may be inside of the other"),
        ("", "train", "neither may be inside of the other"),
        ("artifacts", "model", "neither may be inside of the other"),
    ],
)
def test_a_destination_that_is_no_second_place_is_refused_before_anything_is_copied(
    trained, capsys, destination, run_name, message
):
    given = destination if "place" in destination else trained.uri(destination)
    assert to_second(trained, destination=given, run_name=run_name) == 1
    assert message in capsys.readouterr().err
    assert not trained.artifact().exists()


def test_progress_counts_every_byte_that_stands_at_a_place(trained, capsys):
    assert sync(trained) == 0
    events = [parse_event(line) for line in capsys.readouterr().out.splitlines()]
    done = [event for event in events if isinstance(event, ProgressEvent)]
    assert [(event.unit, event.done == event.total) for event in done] == [("bytes copied", True)] * 2
