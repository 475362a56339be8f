"""Fill gs://BUCKET/raw/ with the source text of the running interpreter's standard library, as JSONL.

Real text on every machine, without a download: over 10 MB, one module a document, tests left out. Idempotent: what
stands in the bucket already is not sent again.

Run:  python pipelines/examples/stdlib_corpus.py [BUCKET]      (default: $PENSTOCK_BUCKET)
"""

from __future__ import annotations

import base64
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
from google.cloud import storage

NUM_SHARDS = 4
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "__pycache__", "lib2to3"}


def main() -> int:
    """Exit code 0 when the corpus stands in the bucket, 2 when no bucket is named."""
    bucket_name = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("PENSTOCK_BUCKET", "")
    if not bucket_name:
        sys.stderr.write("error: no bucket; give its name as argument or in PENSTOCK_BUCKET.\n")
        return 2
    bucket = storage.Client().bucket(bucket_name)
    modules = list(standard_library())
    sent = sum(_upload(bucket, shard, modules[shard::NUM_SHARDS]) for shard in range(NUM_SHARDS))
    size = sum(len(text.encode()) for _, text in modules)
    sys.stdout.write(
        f"gs://{bucket_name}/raw/: {len(modules)} modules, {size / 1e6:.1f} MB, {sent} objects sent\n"
    )
    return 0


def standard_library() -> Iterator[tuple[str, str]]:
    """(path under the library, text) of every module that is UTF-8, sorted by path."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _LEFT_OUT.isdisjoint(relative.parts):
            try:
                yield relative.as_posix(), path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def _upload(bucket: storage.Bucket, shard: int, modules: list[tuple[str, str]]) -> bool:
    """Store one shard unless the same bytes stand there; says whether it was sent."""
    data = "".join(json.dumps({"path": path, "text": text}) + "\n" for path, text in modules).encode()
    blob = bucket.blob(f"raw/stdlib-{shard:05d}-of-{NUM_SHARDS:05d}.jsonl")
    crc32c = base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
    if blob.exists() and (blob.reload() or blob.crc32c) == crc32c:
        return False
    blob.upload_from_string(data, content_type="application/jsonl", checksum="crc32c")
    return True


if __name__ == "__main__":
    sys.exit(main())
