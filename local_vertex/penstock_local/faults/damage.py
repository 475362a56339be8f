"""Stored objects that lose bits: the payload changes, and generation and checksums stay those of what was written."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock_local.faults.spec import Damage
from penstock_local.storage import ObjectStore, StoredObject


def damage_newest(objects: ObjectStore, fault: Damage) -> str:
    """Damage the newest object that matches; what was done to which. Raises LookupError when none does."""
    found = _newest(objects, fault.match, _directory(objects, fault))
    if found is None:
        beside = f" beside {fault.beside.pattern!r}" if fault.beside else ""
        raise LookupError(f"no stored object matches {fault.match.pattern!r}{beside}")
    objects.damage(found.bucket, found.name, cut=fault.how == "cut")
    done = "cut to half" if fault.how == "cut" else "one bit flipped in"
    return f"{done} gs://{found.bucket}/{found.name}"


def _directory(objects: ObjectStore, fault: Damage) -> str:
    if fault.beside is None:
        return ""
    newest = _newest(objects, fault.beside, "")
    return f"{newest.bucket}/{newest.name.rpartition('/')[0]}/" if newest else "\0"


def _newest(objects: ObjectStore, match: re.Pattern[str], directory: str) -> StoredObject | None:
    matching = (
        each
        for each in _all(objects)
        if f"{each.bucket}/{each.name}".startswith(directory) and match.search(f"{each.bucket}/{each.name}")
    )
    return max(matching, key=lambda each: each.generation, default=None)


def _all(objects: ObjectStore) -> Iterator[StoredObject]:
    for bucket in objects.list_buckets():
        token = ""
        while True:
            page = objects.list(bucket.name, page_token=token)
            yield from page.objects
            token = page.next_page_token
            if not token:
                break
