from __future__ import annotations

import json

import pytest

from penstock_local.server import ConfigError, _load_validator


def test_a_validator_is_found_by_module_and_function() -> None:
    assert _load_validator("json:dumps") is json.dumps
    assert _load_validator("") is None


@pytest.mark.parametrize("path", ["no.such:thing", "json:nothing", "json", ":x"])
def test_a_validator_that_is_not_there_is_told(path: str) -> None:
    with pytest.raises(ConfigError, match=f"job validator '{path}' is not MODULE:FUNCTION"):
        _load_validator(path)
