"""The documents of the source: lines of JSONL objects, and every other object as one document."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from penstock_components.launchers.errors import DocumentError
from penstock_components.launchers.sources import Piece, read_pieces
from penstock_trainer.contract.dataset import Source

TEXT_COLUMN = "text"
# Part of the hash: the split is ours, and documents chosen by somebody else's plain SHA-256 do not bias it.
_SPLIT_KEY = b"penstock split v1\0"


@dataclass(frozen=True, slots=True)
class Document:
    """One text, with the keyed hash that decides about it wherever and however often it occurs."""

    text: str
    num_bytes: int
    """Of its UTF-8."""
    digest: bytes
    """SHA-256 over a fixed key and the UTF-8 text."""

    @property
    def id(self) -> str:
        """Hex, for people and files."""
        return self.digest.hex()[:32]

    @property
    def sample_key(self) -> int:
        """Where it stands in the order of the tokenizer's sample; independent of its side of the split."""
        return int.from_bytes(self.digest[8:16], "big")

    def is_held_out(self, eval_fraction: float) -> bool:
        """On which side of the split it is: a function of its text alone. A larger fraction only adds documents."""
        return int.from_bytes(self.digest[:8], "big") < int(eval_fraction * 2**64)


def read_documents(sources: Iterable[Source], *, on_bytes: Callable[[int], None]) -> Iterator[Document]:
    """Every document in the order of the sources; `on_bytes` hears how many bytes were read.

    Documents without text are among them. Memory: one piece, one line, and one object that is not JSONL. Raises
    DocumentError at the first object or line that is not a document, and what `read_pieces` raises.
    """
    for source, pieces in itertools.groupby(read_pieces(sources), key=lambda piece: piece.source):
        counted = _counted(pieces, on_bytes)
        if source.uri.endswith(".jsonl"):
            yield from _jsonl_documents(source, counted)
        else:
            yield _plain_document(source, b"".join(counted))


def document_of(text: str) -> Document:
    """The document with this text. Raises UnicodeEncodeError for lone surrogates, which UTF-8 does not have."""
    data = text.encode()
    return Document(text, len(data), hashlib.sha256(_SPLIT_KEY + data).digest())


def _counted(pieces: Iterable[Piece], on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    for piece in pieces:
        on_bytes(len(piece.data))
        yield piece.data


def _plain_document(source: Source, data: bytes) -> Document:
    try:
        return document_of(data.decode())
    except UnicodeDecodeError as exc:
        raise DocumentError(
            f"{source.uri} is not UTF-8 text: byte {exc.start} is 0x{data[exc.start]:02x}. An object that does not end in "
            ".jsonl is read as one document of plain text; leave other files out of the source, or convert them."
        ) from exc


def _jsonl_documents(source: Source, chunks: Iterable[bytes]) -> Iterator[Document]:
    for number, offset, line in _lines(chunks):
        if line.strip():
            yield _jsonl_document(line, place=f"{source.uri}, line {number} (byte offset {offset})")


def _jsonl_document(line: bytes, *, place: str) -> Document:
    try:
        row = json.loads(line)
    except ValueError as exc:
        raise DocumentError(f"{place} is not JSON: {exc}. Mend or remove the line.") from exc
    text = row.get(TEXT_COLUMN) if isinstance(row, dict) else None
    if not isinstance(text, str):
        given = f"the keys {sorted(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
        if isinstance(row, dict) and TEXT_COLUMN in row:
            given = f"{TEXT_COLUMN!r} as {type(text).__name__}"
        raise DocumentError(f"{place} has {given}; it must be an object with a string {TEXT_COLUMN!r}.")
    try:
        return document_of(text)
    except UnicodeEncodeError as exc:
        raise DocumentError(
            f"{place}: character {exc.start} of the text is a lone surrogate, which UTF-8 does not have."
        ) from exc


def _lines(chunks: Iterable[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, byte offset, line without its newline)."""
    number, offset, rest = 1, 0, b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield number, offset, line
            number, offset = number + 1, offset + len(line) + 1
    if rest:
        yield number, offset, rest
