"""Reading what another task wrote: an object at a URI that must keep a contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock_components.launchers.errors import ContractFileError
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.storage import ObjectNotFoundError, storage_for

T = TypeVar("T")


def read_contract(uri: str, parse: Callable[[bytes], T], *, what: str) -> T:
    """The object at `uri`, parsed. Raises ContractFileError naming the URI if it is missing or `parse` refuses it."""
    try:
        return parse(storage_for(uri).read(uri))
    except ObjectNotFoundError as exc:
        raise ContractFileError(
            f"{uri} does not exist: the task that writes the {what} has not finished."
        ) from exc
    except ContractError as exc:
        raise ContractFileError(f"{uri} does not hold the {what}: {exc}") from exc
