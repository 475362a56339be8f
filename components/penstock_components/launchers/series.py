"""A numbered series of dataset objects that is written while it grows, with the counts that the manifest names."""

from __future__ import annotations

from penstock_trainer.contract.dataset import DatasetObject
from penstock_trainer.storage import join, storage_for

MAX_OBJECT_BYTES = 64 * 1024 * 1024


class ObjectSeries:
    """Collects documents and publishes an object before it would outgrow `max_bytes`; documents are never divided.

    Writing is unconditional: a task that is retried writes the same bytes again.
    """

    def __init__(self, dataset_uri: str, name: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> None:
        """`name` has a place for the number, such as `train/shard-{:05d}.tokens`."""
        self._dataset_uri = dataset_uri
        self._name = name
        self._max_bytes = max_bytes
        self._written: list[DatasetObject] = []
        self._buffer = bytearray()
        self._documents = self._tokens = self._text_bytes = 0

    def add(self, data: bytes, *, tokens: int, text_bytes: int) -> None:
        """Append one document."""
        if self._buffer and len(self._buffer) + len(data) > self._max_bytes:
            self._flush()
        self._buffer += data
        self._documents += 1
        self._tokens += tokens
        self._text_bytes += text_bytes

    def close(self) -> tuple[DatasetObject, ...]:
        """Publish what is left; every object of the series, in order."""
        if self._documents:
            self._flush()
        return tuple(self._written)

    def _flush(self) -> None:
        entry = publish(
            self._dataset_uri,
            self._name.format(len(self._written)),
            bytes(self._buffer),
            documents=self._documents,
            tokens=self._tokens,
            text_bytes=self._text_bytes,
        )
        self._written.append(entry)
        self._buffer = bytearray()
        self._documents = self._tokens = self._text_bytes = 0


def publish(
    dataset_uri: str, name: str, data: bytes, *, documents: int = 0, tokens: int = 0, text_bytes: int = 0
) -> DatasetObject:
    """Write one object of the dataset; its entry for the manifest."""
    uri = join(dataset_uri, name)
    info = storage_for(uri).write(uri, data)
    return DatasetObject(
        name=name,
        size=info.size,
        crc32c=info.crc32c,
        documents=documents,
        tokens=tokens,
        text_bytes=text_bytes,
    )
