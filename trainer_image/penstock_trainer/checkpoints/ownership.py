"""Who may write below a checkpoint root: `owner.json`, taken over by each attempt with a higher fencing token.

A preempted node may be cut off rather than dead, and then wake up to write over its successor; the token is how it
notices.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TypeVar

from penstock_trainer.contract.checkpoint import Owner, owner_uri
from penstock_trainer.errors import FencedError
from penstock_trainer.storage import ObjectNotFoundError, PreconditionFailedError, Storage

T = TypeVar("T")
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


def check_ownership(root_uri: str, owner: Owner, storage: Storage) -> None:
    """Raise FencedError unless `owner` still owns the root. Blocks on storage; raises StorageError and ContractError."""
    standing = Owner.from_json(storage.read(owner_uri(root_uri)))
    if standing != owner:
        raise FencedError(
            f"{root_uri} belongs to attempt {standing.attempt} with fencing token {standing.fencing_token} by now; "
            f"this is attempt {owner.attempt} with token {owner.fencing_token}, which must not write any more."
        )


def replace_as_owner(storage: Storage, uri: str, check: Callable[[], None], change: Callable[[int], T]) -> T:
    """`change(generation)`: a write or delete that is conditional on the generation in which `uri` stands, 0 for none.

    The generation is read before `check` asks whether this attempt still owns the root. So whoever takes the root over
    after the check also writes after the generation was read, and the change fails instead of undoing theirs. It is
    tried again then: an owner loses only to the last write of an attempt before it. Raises what `check` does, and
    StorageError.
    """
    for tries_left in reversed(range(_TRIES)):
        standing = storage.stat(uri)
        check()
        try:
            return change(standing.generation if standing else 0)
        except PreconditionFailedError:
            if tries_left == 0:
                raise
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
