"""What cannot be continued from: an error that says why, before any step, and nothing deleted; and nothing of it executed."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_trainer.checkpoint_root import CheckpointRoot
from penstock_trainer.contract.checkpoint import FORMAT_VERSION
from penstock_trainer.contract.fields import canonical_json
from penstock_trainer.errors import CheckpointError
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.storage import crc32c
from penstock_trainer.world import World
from unit.penstock_trainer.checkpoints.one_matrix import Run, progress_at, state

Change = Callable[[Run], object]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(RankEnv(omp_num_threads=1), timeout_seconds=30) as world:
        yield world


@pytest.fixture
def run(tmp_path: Path, world: World) -> Run:
    """Of which steps 4 and 8 are saved."""
    run = Run(tmp_path / "root", world)
    run.save(run.attempt(), 4, 8)
    return run


def files_below(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def refused(run: Run) -> str:
    """The error of a new attempt, which finds all as it was after it."""
    before = files_below(run.root)
    with pytest.raises(CheckpointError) as caught:
        run.restored()
    assert files_below(run.root) == before
    return str(caught.value)


def rewrite_manifest(run: Run, step: int, **change: Any) -> None:
    path = run.manifest_path(step)
    path.write_text(canonical_json({**json.loads(path.read_text()), **change}))


def rename_object(name: str) -> Change:
    def change(run: Run) -> None:
        for step in (4, 8):
            first, *others = json.loads(run.manifest_path(step).read_text())["objects"]
            rewrite_manifest(run, step, objects=[{**first, "name": name}, *others])

    return change


def empty_shards(run: Run) -> None:
    for step in (4, 8):
        run.objects(step)["0-0.distcp"].write_bytes(b"")


def remove_shards(run: Run) -> None:
    for step in (4, 8):
        run.objects(step)["0-0.distcp"].unlink()


def remove_indices(run: Run) -> None:
    for step in (4, 8):
        run.objects(step)["index.json"].unlink()


def cut_manifests(run: Run) -> None:
    for step in (4, 8):
        run.manifest_path(step).write_text('{"format_version":')


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (empty_shards, r"0-0\.distcp is not the object that was written: .*size 0 instead of \d+"),
        (remove_shards, r"0-0\.distcp is missing, but the manifest names it"),
        (remove_indices, r"index\.json is missing, but the manifest names it"),
        (cut_manifests, r"manifest\.json cannot be read: the checkpoint manifest is not JSON"),
        (rename_object("../0-0.distcp"), r"name.* '\.\./0-0\.distcp'.* a path under the directory"),
        (rename_object("a/../../../x"), r"a path under the directory of its manifest"),
        (rename_object("/etc/passwd"), r"'/etc/passwd'.* a path under the directory of its manifest"),
    ],
    ids=["zero-byte shard", "no shard", "no index", "cut manifest", "parent", "far away", "absolute"],
)
def test_when_every_checkpoint_is_damaged_the_run_ends_with_what_is_wrong(
    run: Run, caplog: pytest.LogCaptureFixture, damage: Change, told: str
) -> None:
    damage(run)
    with caplog.at_level(logging.WARNING):
        message = refused(run)
    assert re.search(r"none can be read: steps 8, 4 are damaged .* Nothing was deleted", message)
    assert len(re.findall(told, caplog.text)) >= 2, caplog.text


def test_step_directories_without_a_manifest_are_no_checkpoints_and_resume_from_needs_one(
    run: Run, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that was killed before its first commit begins again; one that was told where to continue does not."""
    for step in (4, 8):
        run.manifest_path(step).unlink()
    before = files_below(run.root)
    with caplog.at_level(logging.INFO):
        assert run.restored() == (None, -1.0)
    assert "step-00000008 passed over: it was not saved to its end" in caplog.text
    continued = Run(tmp_path / "own", world, resume_from=run.root.as_uri())
    assert re.search("resume_from = .* has no checkpoint that can be read", refused(continued))
    assert files_below(run.root) == before


def test_a_newer_format_is_an_error_although_an_older_checkpoint_could_be_read(run: Run) -> None:
    """The run would write over what a newer version has written."""
    rewrite_manifest(run, 8, format_version=FORMAT_VERSION + 1, something="new")
    message = refused(run)
    assert (run.root / "step-00000008").as_uri() in message
    assert f"format {FORMAT_VERSION + 1} is not known here" in message
    assert "use a penstock that is at least as new as the one that wrote it" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_an_error_that_names_their_tensors(
    tmp_path: Path, world: World, value: float
) -> None:
    run = Run(tmp_path / "root", world)
    with run.checkpointer(run.attempt()) as checkpoints:
        broken = state(8.0)
        broken["model"]["weight"][2, 4] = value
        broken["opt"]["state"]["weight"]["exp_avg_sq"][0, 0] = value
        for step, saved in ((4, state(4.0)), (8, broken)):
            checkpoints.save(progress_at(step), saved)
            assert checkpoints.finish()
    message = refused(run)
    assert (
        "step-00000008 has values that are not finite, in model.weight, opt.state.weight.exp_avg_sq"
        in message
    )
    assert "Nothing was deleted" in message


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"model": {"ffn_dim": 64, "dim": 48}},
            r"another shape: model\.dim = 32 \(here 48\), model\.ffn_dim = 52 \(here 64\)",
        ),
        ({"model": {"num_layers": 3}}, r"model\.num_layers = 2 \(here 3\)"),
        (
            {"optim": {"name": "sgd", "momentum": 0.9}},
            r"optim\.name = 'adamw' .* this run has 'sgd' with momentum 0\.9",
        ),
    ],
)
def test_another_model_or_optimizer_is_an_error_that_names_the_differing_fields(
    run: Run, change: Mapping[str, Mapping[str, Any]], told: str
) -> None:
    sections = {name: replace(getattr(run.config, name), **fields) for name, fields in change.items()}
    run.config = replace(run.config, **sections)
    assert re.search(told, refused(run))


def test_another_tokenizer_is_an_error_and_nothing_is_deleted(run: Run) -> None:
    run.tokenizer_sha256 = "cd" * 32
    assert "another tokenizer" in refused(run)


def test_a_manifest_in_another_steps_directory_is_not_its_checkpoint(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.manifest_path(8).write_bytes(run.manifest_path(4).read_bytes())
    with caplog.at_level(logging.WARNING):
        assert run.restored() == (4, 4.0)
    assert "the manifest is that of step 4, in the directory of step 8" in caplog.text


def edit_index(run: Run, step: int, edit: Callable[[dict[str, Any]], None]) -> None:
    """As somebody would who may write to the bucket: the manifest is made to fit."""
    path = run.objects(step)["index.json"]
    told = json.loads(path.read_text())
    edit(told["tensors"])
    replace_object(run, step, path, json.dumps(told).encode())


def replace_object(run: Run, step: int, path: Path, data: bytes) -> None:
    path.write_bytes(data)
    objects = json.loads(run.manifest_path(step).read_text())["objects"]
    [entry] = [one for one in objects if path.as_posix().endswith(one["name"])]
    entry |= {
        "generation": path.stat().st_mtime_ns,
        "size": len(data),
        "crc32c": crc32c(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    rewrite_manifest(run, step, objects=objects)


def name_outside(tensors: dict[str, Any]) -> None:
    for chunk in tensors["model.weight"]["chunks"]:
        chunk["object"] = "../../../../../../etc/passwd"


def leave_out(tensors: dict[str, Any]) -> None:
    tensors["model.weight"]["chunks"].clear()


def drop_tensor(tensors: dict[str, Any]) -> None:
    del tensors["model.weight"]


def another_dtype(tensors: dict[str, Any]) -> None:
    tensors["model.weight"]["dtype"] = "load"


def beyond_the_end(tensors: dict[str, Any]) -> None:
    tensors["model.weight"]["chunks"][0]["byte_offset"] = 10**9


def other_sizes(tensors: dict[str, Any]) -> None:
    tensors["model.weight"]["chunks"][0]["length"] = 4


@pytest.mark.parametrize(
    "edit", [name_outside, leave_out, drop_tensor, another_dtype, beyond_the_end, other_sizes]
)
def test_an_index_that_says_something_impossible_fills_nothing(run: Run, edit: Callable[..., None]) -> None:
    for step in (4, 8):
        edit_index(run, step, edit)
    assert refused(run)


class Hostile:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self._path),)


def pickled(path: Path) -> bytes:
    return pickle.dumps(Hostile(path))


def saved_by_torch(path: Path) -> bytes:
    file = io.BytesIO()
    torch.save(Hostile(path), file)
    return file.getvalue()


@pytest.mark.parametrize("spelled", [pickled, saved_by_torch])
@pytest.mark.parametrize("name", ["0-0.distcp", "index.json", "manifest.json"])
def test_a_hostile_pickle_is_refused_and_executes_nothing(
    run: Run, tmp_path: Path, name: str, spelled: Callable[[Path], bytes]
) -> None:
    made = tmp_path / "executed"
    pickle.loads(pickled(made))
    assert made.exists(), "it does what it is there for"
    made.unlink()
    for step in (4, 8):
        if name == "manifest.json":
            run.manifest_path(step).write_bytes(spelled(made))
        else:
            replace_object(run, step, run.objects(step)[name], spelled(made))
    assert refused(run)
    assert not made.exists()


def test_a_hostile_pickle_of_the_stock_format_beside_the_objects_is_never_opened(
    run: Run, tmp_path: Path
) -> None:
    made = tmp_path / "executed"
    for directory in (run.root, run.root / "step-00000008", run.objects(8)["index.json"].parent):
        for name in (".metadata", "__0_0.distcp", "checkpoint.pt"):
            (directory / name).write_bytes(pickled(made))
    assert run.restored() == (8, 8.0)
    # Nor where it is all that there is.
    for step in (4, 8):
        run.manifest_path(step).unlink()
    assert run.restored() == (None, -1.0)
    assert CheckpointRoot(run.root.as_uri()).steps() == [8, 4]
    assert not made.exists()
