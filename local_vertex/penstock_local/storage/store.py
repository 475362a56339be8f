"""The store: buckets and objects in SQLite, payloads in files, every change atomic and on disk before it is answered.

A payload is complete and synced before the row that names it is committed, and removed only after the row that named
it is gone. A crash in between leaves a file that nothing names; opening the store removes such files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from penstock_local.storage.blobs import BlobDirectory, ExpectedHashes, StagedBlob
from penstock_local.storage.errors import (
    BucketExistsError,
    BucketNotEmptyError,
    BucketNotFoundError,
    InvalidRequestError,
    ObjectNotFoundError,
)
from penstock_local.storage.listing import MAX_RESULTS, ListQuery, glob_pattern, page_token, successor
from penstock_local.storage.resources import (
    Attributes,
    Bucket,
    Preconditions,
    StoredObject,
    check_bucket_name,
    check_object_name,
    from_microseconds,
)

logger = logging.getLogger(__name__)

ALWAYS = Preconditions()
MAX_COMPONENTS = 32

# Names are blobs of UTF-8, so that SQLite orders them as Cloud Storage does, by their bytes.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS bucket (
    name TEXT PRIMARY KEY, location TEXT NOT NULL, generation INTEGER NOT NULL, metageneration INTEGER NOT NULL,
    updated INTEGER NOT NULL, storage_class TEXT NOT NULL, labels TEXT NOT NULL, iam_policy TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS object (
    bucket TEXT NOT NULL REFERENCES bucket (name), name BLOB NOT NULL, generation INTEGER NOT NULL,
    metageneration INTEGER NOT NULL, size INTEGER NOT NULL, crc32c TEXT NOT NULL, md5 TEXT, component_count INTEGER,
    updated INTEGER NOT NULL, attributes TEXT NOT NULL, blob TEXT NOT NULL,
    PRIMARY KEY (bucket, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS clock (last INTEGER NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class ListPage:
    """A page of a listing."""

    objects: Sequence[StoredObject]
    prefixes: Sequence[str]
    next_page_token: str
    """Empty on the last page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """An object to be read for a copy or a composition."""

    name: str
    generation: int | None = None
    preconditions: Preconditions = ALWAYS


class ObjectStore:
    """Buckets and objects below one directory. Thread-safe; one instance per directory at a time.

    Writes block until the data is on disk. Every method raises BucketNotFoundError or ObjectNotFoundError for what
    is not there, InvalidRequestError for a name that Cloud Storage would refuse, and PreconditionFailedError.
    """

    def __init__(self, root: Path) -> None:
        self._blobs = BlobDirectory(root / "blobs")
        self._lock = threading.RLock()
        # The default `synchronous = FULL` stays: a row that a power cut takes back would name a removed payload.
        self._database = sqlite3.connect(
            root / "objects.sqlite", check_same_thread=False, isolation_level=None
        )
        self._database.row_factory = sqlite3.Row
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.executescript(_SCHEMA)
        removed = self._blobs.keep_only(
            row["blob"] for row in self._database.execute("SELECT blob FROM object")
        )
        if removed:
            logger.info("removed %d payloads of uploads that were cut off", removed)

    def close(self) -> None:
        """Close the database; later calls fail."""
        with self._lock:
            self._database.close()

    # Buckets.

    def create_bucket(
        self,
        name: str,
        location: str = "US-CENTRAL1",
        *,
        storage_class: str = "STANDARD",
        labels: Mapping[str, str] | None = None,
    ) -> Bucket:
        """Raises BucketExistsError."""
        check_bucket_name(name)
        with self._transaction():
            now = self._tick()
            try:
                self._database.execute(
                    "INSERT INTO bucket VALUES (?, ?, ?, 1, ?, ?, ?, '{}')",
                    (name, location.upper(), now, now, storage_class, json.dumps(dict(labels or {}))),
                )
            except sqlite3.IntegrityError as exc:
                raise BucketExistsError(f"The bucket {name!r} already exists and you own it.") from exc
            return self.get_bucket(name)

    def get_bucket(self, name: str, *, preconditions: Preconditions = ALWAYS) -> Bucket:
        """The bucket's metadata."""
        bucket = _to_bucket(self._bucket_row(name))
        preconditions.check(bucket, reading=True)
        return bucket

    def list_buckets(self, *, prefix: str = "") -> tuple[Bucket, ...]:
        """All buckets whose names start with `prefix`, by name."""
        with self._lock:
            rows = self._database.execute("SELECT * FROM bucket ORDER BY name").fetchall()
        return tuple(_to_bucket(row) for row in rows if row["name"].startswith(prefix))

    def update_bucket(
        self, name: str, change: Callable[[Bucket], Bucket], *, preconditions: Preconditions = ALWAYS
    ) -> Bucket:
        """Change labels and storage class; `change` runs inside the transaction and must not block."""
        with self._transaction():
            before = self.get_bucket(name)
            preconditions.check(before)
            after = change(before)
            self._database.execute(
                "UPDATE bucket SET labels = ?, storage_class = ?, updated = ?, metageneration = metageneration + 1 "
                "WHERE name = ?",
                (json.dumps(dict(after.labels)), after.storage_class, self._tick(), name),
            )
            return self.get_bucket(name)

    def delete_bucket(self, name: str, *, preconditions: Preconditions = ALWAYS) -> None:
        """Raises BucketNotEmptyError."""
        with self._transaction():
            preconditions.check(self.get_bucket(name))
            if self._database.execute("SELECT 1 FROM object WHERE bucket = ? LIMIT 1", (name,)).fetchone():
                raise BucketNotEmptyError(f"The bucket {name!r} is not empty; delete its objects first.")
            self._database.execute("DELETE FROM bucket WHERE name = ?", (name,))

    def iam_policy(self, bucket: str) -> dict[str, Any]:
        """What `set_iam_policy` was last given. Nothing enforces it: there is one user."""
        policy: dict[str, Any] = json.loads(self._bucket_row(bucket)["iam_policy"])
        return policy

    def set_iam_policy(self, bucket: str, policy: Mapping[str, Any]) -> None:
        """Keep a policy."""
        with self._transaction():
            self._bucket_row(bucket)
            self._database.execute(
                "UPDATE bucket SET iam_policy = ? WHERE name = ?", (json.dumps(dict(policy)), bucket)
            )

    # Objects: reading.

    def get(
        self, bucket: str, name: str, *, generation: int | None = None, preconditions: Preconditions = ALWAYS
    ) -> StoredObject:
        """The live object's metadata; any other generation than the live one does not exist."""
        found = _to_object(self._object_row(bucket, name, generation))
        preconditions.check(found, reading=True)
        return found

    def open(
        self, bucket: str, name: str, *, generation: int | None = None, preconditions: Preconditions = ALWAYS
    ) -> tuple[StoredObject, BinaryIO]:
        """The object and its payload, unbuffered and seekable; it stays readable when the object is overwritten."""
        with self._lock:  # without it the payload could be removed between the row and the open
            row = self._object_row(bucket, name, generation)
            found = _to_object(row)
            preconditions.check(found, reading=True)
            return found, self._blobs.open(row["blob"])

    def read(self, bucket: str, name: str, *, generation: int | None = None) -> bytes:
        """The whole payload, in memory."""
        _, file = self.open(bucket, name, generation=generation)
        with file:
            return file.read()

    def list(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        page_token: str = "",
        max_results: int = MAX_RESULTS,
        start_offset: str = "",
        end_offset: str = "",
        match_glob: str = "",
        include_trailing_delimiter: bool = False,
    ) -> ListPage:
        """A page of at most 1000 entries; `ListQuery` says what the arguments mean."""
        query = ListQuery(
            prefix=prefix,
            delimiter=delimiter,
            page_token=page_token,
            max_results=max_results,
            start_offset=start_offset,
            end_offset=end_offset,
            match_glob=match_glob,
            include_trailing_delimiter=include_trailing_delimiter,
        )
        with self._lock:
            self._bucket_row(bucket)
            return self._page(bucket, query)

    # Objects: writing.

    def stage(self, *, with_md5: bool = True) -> StagedBlob:
        """A place for the bytes of an upload. Hand it to `commit`, or call its `discard`."""
        return self._blobs.stage(with_md5=with_md5)

    def put(
        self,
        bucket: str,
        name: str,
        data: bytes | BinaryIO,
        *,
        content_type: str = "application/octet-stream",
        metadata: Mapping[str, str] | None = None,
        preconditions: Preconditions = ALWAYS,
    ) -> StoredObject:
        """Write an object, from memory or from a file that is read to its end."""
        staged = self.stage()
        try:
            if isinstance(data, bytes):
                staged.write(data)
            else:
                staged.write_from(data)
        except BaseException:
            staged.discard()
            raise
        attributes = Attributes(content_type=content_type, metadata=metadata or {})
        return self.commit(staged, bucket, name, attributes=attributes, preconditions=preconditions)

    def commit(
        self,
        staged: StagedBlob,
        bucket: str,
        name: str,
        *,
        attributes: Attributes,
        preconditions: Preconditions = ALWAYS,
        expected: ExpectedHashes = (),
        component_count: int | None = None,
    ) -> StoredObject:
        """Make staged bytes the live generation of an object; when it raises, the bytes are discarded.

        Of several commits under `if_generation_match` at once exactly one succeeds. Raises ChecksumMismatchError.
        """
        try:
            staged.check(expected)
            check_object_name(name)
            self.check(bucket, name, preconditions)  # spares the sync when it is lost already
            staged.seal()
            self._blobs.sync()
            row = (staged.size, staged.crc32c, staged.md5, component_count, attributes, staged.path.name)
            return self._publish(bucket, name, row, preconditions)
        except BaseException:
            staged.discard()
            raise

    def check(self, bucket: str, name: str, preconditions: Preconditions) -> None:
        """Raises what a write under these conditions would raise now."""
        check_object_name(name)
        with self._lock:
            self._bucket_row(bucket)
            row = self._find(bucket, name)
        preconditions.check(_to_object(row) if row else None)

    def copy(
        self,
        bucket: str,
        source: Source,
        to_bucket: str,
        to_name: str,
        *,
        attributes: Attributes | None = None,
        preconditions: Preconditions = ALWAYS,
    ) -> StoredObject:
        """Copy an object without copying its bytes. `attributes` replace those of the source."""
        check_object_name(to_name)
        with self._lock:
            row = self._object_row(bucket, source.name, source.generation)
            found = _to_object(row)
            source.preconditions.check(found)
            blob = self._blobs.link(row["blob"])
        try:
            self._blobs.sync()
            kept = (
                found.size,
                found.crc32c,
                found.md5,
                found.component_count,
                attributes or found.attributes,
                blob,
            )
            return self._publish(to_bucket, to_name, kept, preconditions)
        except BaseException:
            self._blobs.remove(blob)
            raise

    def compose(
        self,
        bucket: str,
        sources: Sequence[Source],
        to_name: str,
        *,
        attributes: Attributes,
        preconditions: Preconditions = ALWAYS,
    ) -> StoredObject:
        """Concatenate 1 to 32 objects of a bucket. The result has no MD5."""
        if not 1 <= len(sources) <= MAX_COMPONENTS:
            raise InvalidRequestError(
                f"sourceObjects has {len(sources)} entries; compose takes 1 to {MAX_COMPONENTS}. Compose in steps."
            )
        staged = self.stage(with_md5=False)
        components = 0
        try:
            for source in sources:
                found, file = self.open(bucket, source.name, generation=source.generation)
                with file:
                    source.preconditions.check(found)
                    staged.write_from(file)
                components += found.component_count or 1
        except BaseException:
            staged.discard()
            raise
        return self.commit(
            staged,
            bucket,
            to_name,
            attributes=attributes,
            preconditions=preconditions,
            component_count=components,
        )

    def update(
        self,
        bucket: str,
        name: str,
        change: Callable[[Attributes], Attributes],
        *,
        generation: int | None = None,
        preconditions: Preconditions = ALWAYS,
    ) -> StoredObject:
        """Change the attributes: the generation stays, the metageneration rises by one.

        `change` runs inside the transaction: it must not block.
        """
        with self._transaction():
            found = _to_object(self._object_row(bucket, name, generation))
            preconditions.check(found)
            self._database.execute(
                "UPDATE object SET attributes = ?, updated = ?, metageneration = metageneration + 1 "
                "WHERE bucket = ? AND name = ?",
                (_dump(change(found.attributes)), self._tick(), bucket, name.encode()),
            )
            return self.get(bucket, name)

    def delete(
        self, bucket: str, name: str, *, generation: int | None = None, preconditions: Preconditions = ALWAYS
    ) -> None:
        """Remove the live object for good."""
        with self._transaction():
            row = self._object_row(bucket, name, generation)
            preconditions.check(_to_object(row))
            self._database.execute(
                "DELETE FROM object WHERE bucket = ? AND name = ?", (bucket, name.encode())
            )
        self._blobs.remove(row["blob"])

    def damage(self, bucket: str, name: str, *, cut: bool) -> None:
        """Have the stored bytes of an object go bad, as a medium would: no generation, no checksum changes with them.

        One bit in the middle is changed or, with `cut`, the second half is gone and the size says so.
        """
        with self._transaction():
            row = self._object_row(bucket, name, None)
            size = self._blobs.damage(row["blob"], cut=cut)
            self._database.execute(
                "UPDATE object SET size = ? WHERE bucket = ? AND name = ?", (size, bucket, name.encode())
            )

    # Rows.

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                self._database.execute("ROLLBACK")
                raise

    def _tick(self) -> int:
        """The next generation: the time in microseconds, and more than any before, also when the clock steps back."""
        row = self._database.execute("SELECT last FROM clock").fetchone()
        now = max(time.time_ns() // 1000, row["last"] + 1 if row else 0)
        self._database.execute("DELETE FROM clock")
        self._database.execute("INSERT INTO clock VALUES (?)", (now,))
        return now

    def _publish(
        self,
        bucket: str,
        name: str,
        content: tuple[int, str, str | None, int | None, Attributes, str],
        preconditions: Preconditions,
    ) -> StoredObject:
        size, crc32c, md5, component_count, attributes, blob = content
        with self._transaction():
            self._bucket_row(bucket)
            old = self._find(bucket, name)
            preconditions.check(_to_object(old) if old else None)
            now = self._tick()
            self._database.execute(
                "INSERT OR REPLACE INTO object VALUES (?, ?, ?, 1, ?, ?, ?, ?, ?, ?, ?)",
                (
                    bucket,
                    name.encode(),
                    now,
                    size,
                    crc32c,
                    md5,
                    component_count,
                    now,
                    _dump(attributes),
                    blob,
                ),
            )
            written = self.get(bucket, name)
        if old:
            self._blobs.remove(old["blob"])
        return written

    def _bucket_row(self, name: str) -> sqlite3.Row:
        with self._lock:
            row: sqlite3.Row | None = self._database.execute(
                "SELECT * FROM bucket WHERE name = ?", (name,)
            ).fetchone()
        if row is None:
            raise BucketNotFoundError(f"The specified bucket does not exist: {name!r}.")
        return row

    def _find(self, bucket: str, name: str) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self._database.execute(
            "SELECT * FROM object WHERE bucket = ? AND name = ?", (bucket, name.encode())
        ).fetchone()
        return row

    def _object_row(self, bucket: str, name: str, generation: int | None) -> sqlite3.Row:
        with self._lock:
            self._bucket_row(bucket)
            row = self._find(bucket, name)
        if row is None or generation not in (None, row["generation"]):
            version = "" if generation is None else f"#{generation}"
            live = f" The live generation is {row['generation']}; there is no versioning." if row else ""
            raise ObjectNotFoundError(f"No such object: {bucket}/{name}{version}.{live}")
        return row

    def _page(self, bucket: str, query: ListQuery) -> ListPage:
        low, high = query.bounds()
        wanted = min(query.max_results, MAX_RESULTS)
        glob = glob_pattern(query.match_glob) if query.match_glob else None
        objects: list[StoredObject] = []
        prefixes: list[str] = []
        while True:
            skip_to = None
            for row in self._database.execute(
                "SELECT * FROM object WHERE bucket = ? AND name >= ? AND name < ? ORDER BY name",
                (bucket, low, high),
            ):
                name: bytes = row["name"]
                if glob and not glob.fullmatch(name.decode()):
                    continue
                if len(objects) + len(prefixes) >= wanted:
                    return ListPage(objects, prefixes, page_token(name))
                folder = query.folded(name)
                if folder is None or (query.include_trailing_delimiter and name == folder):
                    objects.append(_to_object(row))
                if folder is not None:
                    prefixes.append(folder.decode())
                    skip_to = successor(folder)  # names below it are not even looked at
                    break
            if skip_to is None:
                return ListPage(objects, prefixes, "")
            low = skip_to


def _to_bucket(row: sqlite3.Row) -> Bucket:
    return Bucket(
        name=row["name"],
        location=row["location"],
        generation=row["generation"],
        metageneration=row["metageneration"],
        updated=from_microseconds(row["updated"]),
        storage_class=row["storage_class"],
        labels=json.loads(row["labels"]),
    )


def _to_object(row: sqlite3.Row) -> StoredObject:
    return StoredObject(
        bucket=row["bucket"],
        name=row["name"].decode(),
        generation=row["generation"],
        metageneration=row["metageneration"],
        size=row["size"],
        crc32c=row["crc32c"],
        md5=row["md5"],
        component_count=row["component_count"],
        updated=from_microseconds(row["updated"]),
        attributes=Attributes(**json.loads(row["attributes"])),
    )


def _dump(attributes: Attributes) -> str:
    return json.dumps(asdict(attributes))
