from __future__ import annotations

import threading

import pytest

from penstock_local.api.errors import UnavailableError
from penstock_local.services.running import RunningJobs


def test_a_run_is_known_until_it_ends_and_shutting_down_cancels_and_awaits_it() -> None:
    running: RunningJobs[threading.Event] = RunningJobs()
    cancelled, inserted = threading.Event(), []
    running.start(
        "jobs/1", cancelled, insert=lambda: inserted.append(1), follow=lambda _, run: run.wait() and None
    )
    assert running.get("jobs/1") is cancelled
    assert running.get("jobs/2") is None
    running.shut_down(threading.Event.set)
    assert running.get("jobs/1") is None
    with pytest.raises(UnavailableError, match="shutting down"):
        running.start("jobs/3", cancelled, insert=lambda: inserted.append(3), follow=lambda *_: None)
    assert inserted == [1]
