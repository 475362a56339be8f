from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock_local.jobs.images import (
    GCPC_REPOSITORY,
    REDUCTION_SERVER_REPOSITORIES,
    ImageMapError,
    UnknownImageError,
    load_image_map,
    repository_of,
)


@pytest.mark.parametrize(
    ("uri", "repository"),
    [
        ("us-docker.pkg.dev/a/b/c", "us-docker.pkg.dev/a/b/c"),
        ("us-docker.pkg.dev/a/b/c:v1", "us-docker.pkg.dev/a/b/c"),
        ("us-docker.pkg.dev/a/b/c@sha256:00ff", "us-docker.pkg.dev/a/b/c"),
        ("us-docker.pkg.dev/a/b/c:v1@sha256:00ff", "us-docker.pkg.dev/a/b/c"),
        ("localhost:5000/c:v1", "localhost:5000/c"),
        ("localhost:5000/c", "localhost:5000/c"),
        ("python:3.11", "python"),
        ("", ""),
    ],
)
def test_tag_and_digest_are_no_part_of_the_repository(uri: str, repository: str) -> None:
    assert repository_of(uri) == repository


def test_a_map_gives_the_program_for_an_image_of_any_tag(tmp_path: Path) -> None:
    file = tmp_path / "images.toml"
    file.write_text("""
        [images."gcr.io/acme/trainer"]
        python = "/opt/python/bin/python"
        entrypoint = ["python", "-m", "trainer"]
        env = { THREADS = "1" }

        [images."gcr.io/acme/plain"]
    """)
    images = load_image_map(file)
    trainer = images.resolve("gcr.io/acme/trainer:v7@sha256:0")
    assert trainer.python == Path("/opt/python/bin/python")
    assert trainer.env == {"THREADS": "1"}
    assert trainer.command_line((), ("--a",)) == ("python", "-m", "trainer", "--a")
    assert trainer.command_line(("sh",), ("-c", "x")) == ("sh", "-c", "x")
    assert images.resolve("gcr.io/acme/plain").python == Path(sys.executable)


@pytest.mark.parametrize("repository", [GCPC_REPOSITORY, *REDUCTION_SERVER_REPOSITORIES])
def test_googles_images_are_known_without_a_map(repository: str) -> None:
    assert load_image_map(None).resolve(f"{repository}:latest").python == Path(sys.executable)


def test_an_unknown_image_is_told_with_what_is_known_and_what_to_add() -> None:
    with pytest.raises(UnknownImageError) as caught:
        load_image_map(None).resolve("gcr.io/acme/trainer:v7")
    message = str(caught.value)
    assert "'gcr.io/acme/trainer:v7'" in message
    assert GCPC_REPOSITORY in message
    assert '[images."gcr.io/acme/trainer"]' in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[images", "image map"),
        ("\xff\xfe", "image map"),
        ("[image.x]\n", "only tables"),
        ("images = 3", "only tables"),
        ('[images."a:v1"]', "give 'a', without tag or digest"),
        ("[images.a]\ncommand = []", "{'command': []}"),
        ('[images.a]\nentrypoint = "python -m x"', "an array of strings"),
        ("[images.a]\nentrypoint = [1]", "an array of strings"),
        ("[images.a]\nenv = { X = 1 }", "a table of strings"),
        ("[images.a]\nenv = []", "a table of strings"),
        ("[images.a]\npython = 3", "a path"),
        ("[images]\na = 3", "is 3"),
    ],
)
def test_a_map_that_makes_no_sense_is_an_error_that_names_the_file(
    tmp_path: Path, text: str, told: str
) -> None:
    file = tmp_path / "images.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ImageMapError, match="image map") as caught:
        load_image_map(file)
    assert str(file) in str(caught.value)
    assert told in str(caught.value)


def test_a_map_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ImageMapError, match="nowhere"):
        load_image_map(tmp_path / "nowhere.toml")
