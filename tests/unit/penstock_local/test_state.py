from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_local.state import ServerInfo, StateDirectory, StateInUseError


def test_a_state_directory_has_one_user_at_a_time(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "state")
    held = state.lock()
    with pytest.raises(StateInUseError) as caught:
        state.lock()
    assert str(state.root) in str(caught.value)
    assert f"process id {os.getpid()}" in str(caught.value)
    held.close()
    state.lock().close()


def test_a_killed_user_does_not_hold_it(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "state")
    take = (
        "import os, pathlib, sys; from penstock_local.state import StateDirectory; "
        "held = StateDirectory(pathlib.Path(sys.argv[1])).lock(); os.abort()"
    )
    done = subprocess.run([sys.executable, "-c", take, str(state.root)], capture_output=True)
    assert done.returncode < 0
    state.lock().close()


def test_the_server_file_is_its_owners_alone_and_goes_when_withdrawn(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "state")
    state.lock().close()
    state.publish(ServerInfo(1, 2, "demo", "us-central1", {"A": "b"}, ("C",)))
    assert '"front_port": 2' in state.server_file.read_text()
    assert stat.S_IMODE(state.server_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(state.root.stat().st_mode) == 0o700
    state.withdraw()
    state.withdraw()
    assert not state.server_file.exists()
