"""Cloud Storage on disk: what unmodified clients speak to over the JSON and the XML API.

Three layers: the wire (`app`, `json_api`, `xml_api`, `media`), what the API means (`uploads`, `resources`), and the
store (`store`, `blobs`). There is no object versioning: an overwrite makes a new generation and the old one is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock_local.storage.resources import Attributes, Bucket, Preconditions, StoredObject
from penstock_local.storage.store import ListPage, ObjectStore

if TYPE_CHECKING:
    from penstock_local.storage.app import build_app

__all__ = ["Attributes", "Bucket", "ListPage", "ObjectStore", "Preconditions", "StoredObject", "build_app"]


def __getattr__(name: str) -> Any:
    # The wire brings Starlette; whoever only wants the store should not pay for it.
    if name == "build_app":
        from penstock_local.storage.app import build_app

        return build_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
