from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock_trainer.checkpoints.ownership import take_ownership
from penstock_trainer.contract.checkpoint import Owner, owner_uri
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.storage import FileStorage


def test_each_attempt_takes_the_root_with_a_higher_token(tmp_path: Path) -> None:
    root_uri, storage = tmp_path.as_uri(), FileStorage()
    first = take_ownership(root_uri, storage)
    second = take_ownership(root_uri, storage)
    assert (first.fencing_token, second.fencing_token) == (1, 2)
    assert first.attempt != second.attempt
    assert Owner.from_json(storage.read(owner_uri(root_uri))) == second


def test_attempts_that_race_get_tokens_of_their_own(tmp_path: Path) -> None:
    root_uri, storage = tmp_path.as_uri(), FileStorage()
    with ThreadPoolExecutor(3) as pool:
        owners = list(pool.map(lambda _: take_ownership(root_uri, storage), range(3)))
    assert sorted(owner.fencing_token for owner in owners) == [1, 2, 3]
    assert Owner.from_json(storage.read(owner_uri(root_uri))).fencing_token == 3


def test_what_is_no_owner_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "owner.json").write_text('{"attempt": "a"}')
    with pytest.raises(ContractError, match="fencing_token"):
        take_ownership(tmp_path.as_uri(), FileStorage())
    assert (tmp_path / "owner.json").read_text() == '{"attempt": "a"}'
