"""The launcher without torch: verdicts, reports, single rank processes, the command line."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_trainer.__main__ import main
from penstock_trainer.cluster import Cluster
from penstock_trainer.contract.events import ProgressEvent
from penstock_trainer.outcome import Outcome, RankEnd, decide, mends_in_place, read_end
from penstock_trainer.ranks import Ranks
from penstock_trainer.rendezvous import listen, reserved_port
from penstock_trainer.watch import Signals


def end(
    rank: int, outcome: Outcome, at: float = 0.0, *, reported: bool = True, stopped: bool = False
) -> RankEnd:
    return RankEnd(
        rank=rank,
        outcome=outcome,
        reported=reported,
        stopped=stopped,
        ended_at=at,
        error=f"error of rank {rank}",
    )


DONE = end(0, "done")
STOPPED = end(1, "retryable", reported=False, stopped=True)


@pytest.mark.parametrize(
    ("ends", "lost_nodes", "exit_code", "reason"),
    [
        ([DONE, end(1, "done")], [], 0, "all 2 ranks are done"),
        ([DONE, end(1, "preempted")], [], 134, "rank 1 was preempted"),
        ([DONE, end(1, "retryable")], [], 134, "rank 1 was lost or lost its peers"),
        ([DONE, end(1, "failed")], [], 1, "rank 1 failed"),
        # A failure of a rank's own decides although its peers noticed the broken connection first.
        ([end(0, "retryable", 1.0), end(1, "failed", 2.0)], [], 1, "rank 1 failed"),
        ([end(0, "failed", 2.0), end(1, "failed", 1.0)], [], 1, "rank 1 failed"),
        # A script reports nothing: then the first that ended decides, and the others are consequences.
        (
            [end(0, "failed", 2.0, reported=False), end(1, "retryable", 1.0, reported=False)],
            [],
            134,
            "rank 1 was lost",
        ),
        (
            [end(0, "failed", 1.0, reported=False), end(1, "retryable", 2.0, reported=False)],
            [],
            1,
            "rank 0 failed",
        ),
        ([end(0, "retryable", 1.0), end(1, "failed", 2.0, reported=False)], [], 1, "rank 1 failed"),
        # What the launcher stopped is never the cause while there is another.
        ([end(0, "failed", 2.0, reported=False), STOPPED], [], 1, "rank 0 failed"),
        ([DONE, STOPPED], [], 134, "rank 1 was lost"),
        ([STOPPED], [2], 134, "the launcher of node 2 is no longer heard of"),
        ([DONE], [1, 2], 134, "the launcher of node 1, 2 is no longer heard of"),
        ([end(0, "failed")], [1], 1, "rank 0 failed"),
    ],
)
def test_the_first_cause_decides(
    ends: list[RankEnd], lost_nodes: list[int], exit_code: int, reason: str
) -> None:
    verdict = decide(ends, lost_nodes)
    assert verdict.exit_code == exit_code
    assert verdict.reason.startswith(reason)


@pytest.mark.parametrize(
    ("ends", "ours", "scripts"),
    [
        ([DONE, end(1, "done")], False, False),
        ([DONE, end(1, "retryable", reported=False)], True, True),
        ([end(0, "retryable"), end(1, "retryable", reported=False)], True, True),
        ([end(0, "retryable"), end(1, "failed")], False, True),
        ([DONE, end(1, "failed", reported=False)], False, True),
        # Whoever was preempted is about to lose the node, whatever the peers made of it.
        ([end(0, "retryable"), end(1, "preempted")], False, False),
    ],
)
def test_what_another_try_on_the_same_nodes_may_mend(ends: list[RankEnd], ours: bool, scripts: bool) -> None:
    assert (mends_in_place(ends, reports=True), mends_in_place(ends, reports=False)) == (ours, scripts)


def test_a_signal_that_came_too_late_for_a_round_is_heard_in_the_next() -> None:
    with Signals() as signals:
        signals.repeat()
        assert signals.queue.empty()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.queue.get(timeout=5) == signal.SIGTERM
        signals.repeat()
        signals.repeat()
        assert signals.queue.get(timeout=5) == signal.SIGTERM
        assert signals.queue.empty()


def test_the_reason_carries_step_and_traceback(tmp_path: Path) -> None:
    file = tmp_path / "rank-3.json"
    file.write_text(
        json.dumps({"outcome": "failed", "step": 12, "error": "nan", "traceback": "Traceback\n  nan\n"})
    )
    told = read_end(3, 1, file, stopped=False, ended_at=0.0)
    assert decide([told]).reason == "rank 3 failed at step 12: nan\nTraceback\n  nan"


@pytest.mark.parametrize(
    ("written", "returncode", "outcome", "error"),
    [
        ('{"outcome": "done"}', -6, "done", ""),
        ('{"outcome": "preempted", "step": null}', 1, "preempted", ""),
        (None, -9, "retryable", "died by signal 9 (Killed)"),
        ('{"outcome": "do', -9, "retryable", "died by signal 9 (Killed)"),
        ('{"outcome": "great"}', 2, "failed", "exit code 2 without a report"),
        (None, 0, "failed", "exit code 0 without a report"),
    ],
)
def test_a_report_counts_before_the_return_code(
    tmp_path: Path, written: str | None, returncode: int, outcome: str, error: str
) -> None:
    file = tmp_path / "rank-0.json"
    if written is not None:
        file.write_text(written)
    told = read_end(0, returncode, file, stopped=False, ended_at=0.0)
    assert (told.outcome, told.error) == (outcome, error)


def test_a_script_that_reports_nothing_is_done_with_exit_code_0() -> None:
    assert read_end(0, 0, None, stopped=False, ended_at=0.0).outcome == "done"


def test_lines_of_other_ranks_are_marked_but_events_are_not(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    event = ProgressEvent(done=1, total=2, unit="files").to_line()
    lines = [event, "plain", '{"some": "json"}', "no newline at the end"]
    program = f"import sys; sys.stdout.write({chr(10).join(lines)!r}); sys.stderr.write('told\\n')"
    events: queue.SimpleQueue[RankEnd | int] = queue.SimpleQueue()
    with Ranks(events) as ranks:
        for rank in range(2):
            ranks.start(rank, [sys.executable, "-c", program], os.environ, None)
            assert isinstance(told := events.get(timeout=20), RankEnd)
            assert told.outcome == "done"
    out, err = capfdbinary.readouterr()
    assert out.decode().startswith("\n".join(lines))
    marked = [event, "[rank 1] plain", '[rank 1] {"some": "json"}', "[rank 1] no newline at the end", ""]
    assert out.decode().endswith("\n".join(marked))
    assert err.decode() == "told\n[rank 1] told\n"


def test_leaving_kills_ranks_and_what_they_started() -> None:
    events: queue.SimpleQueue[RankEnd | int] = queue.SimpleQueue()
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as alive:
        program = "sleep 600 & sleep 600 & wait"
        with Ranks(events) as ranks:
            # Every process of the rank holds the pipe's other end, as it holds its standard output.
            saved = os.dup(1)
            os.dup2(writer, 1)
            os.close(writer)
            ranks.start(0, ["sh", "-c", program], os.environ, None)
            os.dup2(saved, 1)
            os.close(saved)
        assert alive.read() == b""  # the end comes when the last of them is gone
    told = events.get(timeout=5)
    assert isinstance(told, RankEnd)
    assert (told.outcome, told.stopped) == ("retryable", True)


def test_the_shim_starts_nothing_for_a_parent_that_has_ended() -> None:
    shim = Path(sys.modules["penstock_trainer.ranks"].__file__ or "").with_name("die_with_parent.py")
    ran = subprocess.run(
        [sys.executable, "-I", "-S", shim, "1", "echo", "started"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert "the launcher (pid 1) has ended" in ran.stderr


def test_listeners_on_loopback_addresses_of_their_own_share_a_port() -> None:
    with reserved_port("127.0.0.1") as held:
        port = held.getsockname()[1]
    listeners = [
        listen(
            Cluster(
                num_nodes=2,
                node_rank=0,
                primary_host=f"127.7.7.{last}",
                primary_port=port,
                open_ports=(),
                pool="workerpool0",
            )
        )
        for last in (1, 2)
    ]
    for listener in listeners:
        with listener.socket, socket.create_connection((listener.address, port), timeout=5.0):
            assert listener.port == port


def test_a_primary_whose_name_is_a_service_address_listens_everywhere() -> None:
    # 192.0.2.0/24 is reserved for documentation: no machine has such an address.
    cluster = Cluster(
        num_nodes=2, node_rank=0, primary_host="192.0.2.1", primary_port=0, open_ports=(), pool="workerpool0"
    )
    listener = listen(cluster)
    with listener.socket, socket.create_connection((listener.address, listener.port), timeout=5.0):
        assert listener.address == "127.0.0.1"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--stepz=3", "--checkpoint.uri=file:///nowhere"], "UnknownFieldError: there is no field 'stepz'"),
        (["--steps=-1"], "FieldValueError: steps = -1 is not valid"),
        (["--config={"], "ContractError: --config (the output of JobConfig.to_json()) is not JSON"),
        ([], "Give --checkpoint.uri=gs://BUCKET/DIR, or set base_output_directory"),
        (["launch", "--"], "there is no command to launch"),
        (["launch", "--", "no-such-program"], "'no-such-program' is not a program on PATH"),
        (["launch", "--processes-per-node=0", "--", "true"], "--processes-per-node=0 is not valid"),
        (["launch", "--max-restarts=-1", "--", "true"], "--max-restarts=-1 is not valid"),
        (["launch", "--checkpoint-dir=d", "--", "true"], "--checkpoint-dir=d has nowhere to be copied to"),
        (
            ["launch", "--checkpoint-dir=d", "--checkpoint-uri=file:///u", "--sync-seconds=0", "--", "true"],
            "--sync-seconds=0.0 is not valid",
        ),
    ],
)
def test_what_cannot_start_is_told_once_and_exits_1(
    argv: list[str], message: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CLUSTER_SPEC", "AIP_CHECKPOINT_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert main(argv) == 1
    [record] = caplog.records
    assert message in record.getMessage()
