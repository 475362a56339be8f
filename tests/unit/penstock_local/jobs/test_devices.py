from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock_local.jobs.devices import divide, visible_devices


@pytest.mark.parametrize(
    ("devices", "wanted", "shares"),
    [
        ("0123", [1, 1], [("0",), ("1",)]),
        ("0123", [2, 2], [("0", "1"), ("2", "3")]),
        ("01", [1, 1, 0], [("0",), ("1",), ()]),
        ("01", [0, 0], [(), ()]),
        ("", [0], [()]),
        ("75", [1, 1], [("7",), ("5",)]),
        ("0", [1, 1], None),
        ("012", [2, 2], None),
        ("", [1], None),
    ],
)
def test_each_replica_gets_devices_of_its_own_or_none_gets_any(
    devices: str, wanted: list[int], shares: list[tuple[str, ...]] | None
) -> None:
    assert divide(tuple(devices), wanted) == shares


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", ()), ("3", ("3",)), ("0, 2", ("0", "2")), ("GPU-a,GPU-b", ("GPU-a", "GPU-b"))],
)
def test_the_stand_ins_own_choice_of_devices_is_kept(
    monkeypatch: pytest.MonkeyPatch, given: str, expected: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_devices() == expected


def test_otherwise_the_driver_is_asked_and_where_there_is_none_there_are_no_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_devices() == ()
    driver = tmp_path / "nvidia-smi"
    driver.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n"
    )
    driver.chmod(0o700)
    assert os.access(driver, os.X_OK)
    assert visible_devices() == ("0", "1")
