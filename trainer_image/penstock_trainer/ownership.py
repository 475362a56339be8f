"""Who may write below a checkpoint root: `owner.json`, taken over by each attempt with a higher fencing token.

A preempted node may be cut off rather than dead, and then wake up to write over its successor; the token is how it
notices.
"""

from __future__ import annotations

import secrets

from penstock_trainer.contract.checkpoint import Owner, owner_uri
from penstock_trainer.storage import ObjectNotFoundError, PreconditionFailedError, Storage

_TRIES = 5


def take_ownership(root_uri: str, storage: Storage) -> Owner:
    """Become the owner of a checkpoint root under a new attempt id, with the standing token + 1.

    Blocks on storage. Two callers at once both succeed, one after the other, and the later one is the owner. Raises
    StorageError, and ContractError when the standing owner.json is not an owner.
    """
    uri = owner_uri(root_uri)
    attempt = secrets.token_hex(4)
    for tries_left in reversed(range(_TRIES)):
        generation, standing = _standing(uri, storage)
        if standing is not None and standing.attempt == attempt:
            return standing  # written by the try before, whose answer was lost
        owner = Owner(attempt=attempt, fencing_token=standing.fencing_token + 1 if standing else 1)
        try:
            storage.write(
                uri,
                owner.to_json().encode(),
                if_generation_match=generation,
                content_type="application/json",
            )
        except PreconditionFailedError:
            if tries_left == 0:
                raise
        else:
            return owner
    raise AssertionError("the last try returns or raises")


def _standing(uri: str, storage: Storage) -> tuple[int, Owner | None]:
    """(generation, owner) of what stands there; (0, None) when nothing does."""
    info = storage.stat(uri)
    if info is None:
        return 0, None
    try:
        return info.generation, Owner.from_json(storage.read(uri, generation=info.generation))
    except ObjectNotFoundError:
        return _standing(uri, storage)  # overwritten between the two calls
