"""What a source URI stands for."""

import dataclasses

import pytest

from penstock_components.launchers import fingerprint
from penstock_components.launchers.errors import SourceError
from penstock_components.launchers.sources import PIECE_BYTES, fingerprint_of, list_sources, read_pieces
from penstock_trainer.storage import ObjectNotFoundError


@pytest.fixture
def raw(bed):
    for name in ("raw/a.jsonl", "raw/b.txt", "raw/deep/c.jsonl", "raw/with space/d.jsonl"):
        bed.write(name, name)
    return bed


def names(bed, *parts):
    root = bed.uri("raw")
    pattern = "/".join([root, *parts])
    return [source.uri.removeprefix(root + "/") for source in list_sources(pattern)]


def test_one_object_stands_for_itself(raw):
    assert names(raw, "a.jsonl") == ["a.jsonl"]


def test_a_prefix_stands_for_everything_below_sorted(raw):
    assert names(raw, "") == ["a.jsonl", "b.txt", "deep/c.jsonl", "with%20space/d.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.jsonl", ["a.jsonl"]),
        ("*", ["a.jsonl", "b.txt"]),
        ("**.jsonl", ["a.jsonl", "deep/c.jsonl", "with%20space/d.jsonl"]),
        ("*/*.jsonl", ["deep/c.jsonl", "with%20space/d.jsonl"]),
        ("with%20space/*", ["with%20space/d.jsonl"]),
    ],
)
def test_one_star_stays_in_its_directory_and_two_do_not(raw, pattern, found):
    assert names(raw, pattern) == found


@pytest.mark.parametrize("pattern", ["none.jsonl", "none/", "*.parquet"])
def test_a_source_without_objects_names_the_uri_and_what_would_match(raw, pattern):
    with pytest.raises(SourceError) as error:
        names(raw, pattern)
    assert f"no object matches {raw.uri('raw')}/{pattern}" in str(error.value)
    assert "a prefix that ends in a slash" in str(error.value)


def test_a_directory_without_its_slash_is_recognised(raw):
    with pytest.raises(SourceError, match=r"did you mean file://.*/raw/deep/ \?"):
        names(raw, "deep")


def test_a_source_of_empty_objects_is_an_error(bed):
    bed.write("raw/empty.txt", "")
    with pytest.raises(SourceError, match="is empty: the 1 objects that match have 0 bytes"):
        names(bed, "")


def test_the_fingerprint_depends_on_every_field_and_not_on_the_order(raw):
    sources = list_sources(raw.uri("raw") + "/")
    before = fingerprint_of(sources)
    assert fingerprint_of(reversed(sources)) == before
    for change in ({"uri": "x"}, {"generation": 1}, {"size": 1}, {"crc32c": "AAAAAA=="}):
        assert fingerprint_of((dataclasses.replace(sources[0], **change), *sources[1:])) != before


def test_the_fingerprint_task_sees_a_rewritten_object(raw):
    seen = []
    for text in ("first", "other"):
        raw.write("raw/a.jsonl", text)
        parameters = {"source_uri": raw.uri("raw") + "/"}
        assert raw.run(fingerprint.main, parameters, returns=["fingerprint"]) == 0
        seen.append(raw.parameter("fingerprint"))
    assert len(set(seen)) == 2
    assert all(len(value) == 64 for value in seen)


def test_the_fingerprint_task_tells_a_missing_source_without_a_traceback(raw, capsys):
    assert raw.run(fingerprint.main, {"source_uri": raw.uri("none") + "/"}, returns=["fingerprint"]) == 1
    assert capsys.readouterr().err.startswith("SourceError: no object matches file://")
    assert not raw.has_output()


def test_a_scheme_that_is_no_storage_is_told_without_a_traceback(bed, capsys):
    assert bed.run(fingerprint.main, {"source_uri": "s3://bucket/x"}, returns=["fingerprint"]) == 1
    assert "give gs://BUCKET/NAME or file:///PATH" in capsys.readouterr().err


def test_pieces_come_in_order_and_make_up_the_objects(bed):
    content = {"a": bytes(range(256)) * (PIECE_BYTES // 200), "b": b"", "c": b"tail"}
    for name, data in content.items():
        bed.write(f"raw/{name}", data)
    found: dict[str, bytes] = {}
    for piece in read_pieces(list_sources(bed.uri("raw") + "/")):
        name = piece.source.uri[-1]
        assert piece.start == len(found.get(name, b""))
        found[name] = found.get(name, b"") + piece.data
    assert found == content
    assert len(content["a"]) > PIECE_BYTES


def test_an_object_that_was_overwritten_since_it_was_listed_is_not_read(bed):
    bed.write("raw/a", "one")
    sources = list_sources(bed.uri("raw") + "/")
    bed.tick()
    bed.write("raw/a", "two")
    with pytest.raises(ObjectNotFoundError, match="it was overwritten"):
        list(read_pieces(sources))


def test_bytes_with_another_checksum_are_refused(bed):
    bed.write("raw/a", "one")
    (source,) = list_sources(bed.uri("raw") + "/")
    with pytest.raises(SourceError, match=r"read CRC32C .*, storage lists AAAAAA=="):
        list(read_pieces([dataclasses.replace(source, crc32c="AAAAAA==")]))
