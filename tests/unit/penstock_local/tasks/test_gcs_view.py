from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock_local.storage import ObjectStore
from penstock_local.tasks.gcs_view import gcs_view


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[ObjectStore]:
    store = ObjectStore(tmp_path / "objects")
    store.create_bucket("bucket")
    yield store
    store.close()


def executor_input(*, inputs: tuple[str, ...] = (), outputs: tuple[str, ...] = ()) -> dict[str, Any]:
    def side(uris: tuple[str, ...]) -> dict[str, Any]:
        return {"artifacts": {f"a{number}": {"artifacts": [{"uri": uri}]} for number, uri in enumerate(uris)}}

    return {"inputs": side(inputs), "outputs": side(outputs)}


def names(objects: ObjectStore) -> list[str]:
    return [found.name for found in objects.list("bucket").objects]


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("gs://bucket/data", ["data/a.txt", "data/sub/b.txt"]),
        ("gs://bucket/data/", ["data/a.txt", "data/sub/b.txt"]),
        ("gs://bucket/data/a.txt", ["data/a.txt"]),
        ("gs://bucket", ["data/a.txt", "data/sub/b.txt", "database"]),
        ("gs://bucket/none", []),
        ("gs://elsewhere/data", []),
        ("https://example.com/data", []),
    ],
)
def test_an_input_artifact_is_there_as_its_file_or_its_folder(
    objects: ObjectStore, tmp_path: Path, uri: str, expected: list[str]
) -> None:
    for name in ("data/a.txt", "data/sub/b.txt", "database"):
        objects.put("bucket", name, name.encode())
    with gcs_view(tmp_path / "gcs", objects, executor_input(inputs=(uri,))) as view:
        root = view.root / "bucket"
        assert sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) == expected
        assert all((root / name).read_text() == name for name in expected)
    assert not (tmp_path / "gcs").exists()


def test_output_files_and_folders_become_objects_and_nothing_else_does(
    objects: ObjectStore, tmp_path: Path
) -> None:
    told = executor_input(
        outputs=("gs://bucket/run/model", "gs://bucket/run/metrics.json", "gs://bucket/run/unwritten")
    )
    with gcs_view(tmp_path / "gcs", objects, told) as view:
        for name in ("run/model/weights/0.bin", "run/model/config.json", "run/metrics.json", "run/scratch"):
            path = view.root / "bucket" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        view.bring_out(told)
    assert names(objects) == ["run/metrics.json", "run/model/config.json", "run/model/weights/0.bin"]
    assert objects.read("bucket", "run/model/weights/0.bin") == b"run/model/weights/0.bin"


def test_names_that_no_mount_can_show_write_nothing_outside(objects: ObjectStore, tmp_path: Path) -> None:
    for name in ("data/../../../escaped", "data/folder/"):
        objects.put("bucket", name, b"x")
    with gcs_view(tmp_path / "gcs", objects, executor_input(inputs=("gs://bucket/data",))) as view:
        assert not [path for path in view.root.rglob("*") if path.is_file()]
    assert not (tmp_path / "escaped").exists()


def test_the_view_is_gone_after_a_failure_as_well(objects: ObjectStore, tmp_path: Path) -> None:
    objects.put("bucket", "data", b"x")
    view = gcs_view(tmp_path / "gcs", objects, executor_input(inputs=("gs://bucket/data",)))
    view.__enter__()
    assert (tmp_path / "gcs" / "bucket" / "data").exists()
    failure = RuntimeError("the task")
    assert not view.__exit__(RuntimeError, failure, failure.__traceback__)
    assert not (tmp_path / "gcs").exists()
