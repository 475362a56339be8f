"""From bytes to documents."""

import json

import pytest

from penstock_components.launchers.documents import document_of, read_documents
from penstock_components.launchers.errors import DocumentError
from penstock_components.launchers.sources import PIECE_BYTES, list_sources


def documents(bed):
    return list(read_documents(list_sources(bed.uri("raw") + "/"), on_bytes=lambda count: None))


def test_jsonl_has_a_document_a_line_and_other_objects_are_one_document(bed):
    bed.write("raw/a.jsonl", '{"text": "one", "id": 7}\n\n{"text": "zw\\u00f6lf"}')
    bed.write("raw/b.py", "print(1)\nprint(2)\n")
    found = documents(bed)
    assert [document.text for document in found] == ["one", "zwölf", "print(1)\nprint(2)\n"]
    assert [document.num_bytes for document in found] == [3, 6, 18]


def test_a_line_that_crosses_pieces_is_one_line(bed):
    texts = ["a" * (PIECE_BYTES - 20), "b" * 100, "c" * (PIECE_BYTES + 1)]
    bed.write("raw/a.jsonl", "\n".join(json.dumps({"text": text}) for text in texts))
    assert [document.text for document in documents(bed)] == texts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "unclosed', "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b'{"body": "x"}', r"has the keys \['body'\]; it must be an object with a string 'text'"),
        (b'{"text": null}', "has 'text' as NoneType"),
        (b'["text"]', "has a list"),
        (b'{"text": "\\ud800"}', "character 0 of the text is a lone surrogate"),
    ],
)
def test_a_bad_line_is_told_with_object_line_and_byte_offset(bed, line, message):
    uri = bed.write("raw/a.jsonl", '{"text": "zwölf"}\n'.encode() * 2 + line + b'\n{"text": "x"}\n')
    with pytest.raises(DocumentError, match=message) as error:
        documents(bed)
    assert str(error.value).startswith(f"{uri}, line 3 (byte offset 38)")


def test_a_binary_object_is_told_with_its_byte(bed):
    uri = bed.write("raw/model.bin", b"abc\xff")
    with pytest.raises(DocumentError) as error:
        documents(bed)
    assert str(error.value).startswith(f"{uri} is not UTF-8 text: byte 3 is 0xff")


def test_the_split_follows_the_fraction():
    found = [document_of(f"document {number}") for number in range(4000)]
    share = sum(document.is_held_out(0.1) for document in found) / len(found)
    # 4000 fair draws at 0.1 have a standard deviation of 0.0047; four of them.
    assert share == pytest.approx(0.1, abs=0.019)


def test_a_larger_fraction_only_adds_held_out_documents():
    found = [document_of(f"document {number}") for number in range(1000)]
    small = {document.id for document in found if document.is_held_out(0.05)}
    large = {document.id for document in found if document.is_held_out(0.2)}
    assert small < large
