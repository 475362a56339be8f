"""Beats of one process as another reads them, and what is made of ranks that no longer beat."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock_trainer.contract.config import CheckpointConfig, EngineConfig, JobConfig
from penstock_trainer.contract.fields import canonical_json, from_dict, load_json
from penstock_trainer.heartbeat import FILE_BYTES, TRACEBACK_SIGNAL, Heart, Phase, Pulse, read_pulse
from penstock_trainer.launch import trainer_timing
from penstock_trainer.outcome import NodeEnd, RankEnd, Silence, ThreadState, decide, read_end
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.watch import Timing


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "beats"


def test_the_last_beat_is_what_is_read(file: Path) -> None:
    assert read_pulse(file) is None
    heart = Heart(file)
    assert read_pulse(file) is None
    heart.beat("training", 12)
    heart.beat("training", 13)
    heart.beat("training", 13)
    time.sleep(0.05)
    pulse = read_pulse(file)
    assert pulse is not None
    assert (pulse.phase, pulse.step, pulse.beats) == ("training", 13, 2)
    assert 0.05 <= pulse.age_seconds < 5
    heart.beat("evaluating", 13)
    assert (after := read_pulse(file)) is not None
    assert (after.phase, after.beats) == ("evaluating", 1)


def test_where_no_launcher_listens_a_beat_does_nothing() -> None:
    before = signal.getsignal(TRACEBACK_SIGNAL)
    Heart(None).beat("training", 1)
    assert signal.getsignal(TRACEBACK_SIGNAL) is before


def test_a_rank_is_told_where_to_beat() -> None:
    assert RankEnv.from_environ({}).heartbeat_file is None
    told = RankEnv.from_environ({"PENSTOCK_HEARTBEAT_FILE": "/somewhere/rank-0"})
    assert told.heartbeat_file == Path("/somewhere/rank-0")


def test_a_beat_that_was_cut_short_leaves_the_one_before(file: Path) -> None:
    heart = Heart(file)
    heart.beat("training", 1)
    before = file.read_bytes()
    heart.beat("training", 2)
    after = bytearray(file.read_bytes())
    changed = [at for at in range(FILE_BYTES) if before[at] != after[at]]
    for torn_at in changed[1:]:
        torn = bytes(after[:torn_at]) + before[torn_at:]
        file.write_bytes(torn)
        pulse = read_pulse(file)
        assert pulse is not None
        assert pulse.step == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0",
        bytes(FILE_BYTES),
        b"\xff" * FILE_BYTES,
        random.Random(0).randbytes(FILE_BYTES),
        b"a" * 9999,
    ],
)
def test_what_no_heart_has_written_is_no_pulse(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert read_pulse(file) is None


def test_a_directory_is_no_pulse(tmp_path: Path) -> None:
    assert read_pulse(tmp_path) is None


def test_a_reader_never_sees_two_beats_mixed(file: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from penstock_trainer.heartbeat import Heart\n"
        "heart, step = Heart(Path(sys.argv[1])), 0\n"
        "while True: step += 1; heart.beat(('saving', 'training')[step % 2], step)"
    )
    environ = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program, str(file)], env=environ) as writer:
        try:
            steps = [0]
            deadline = time.monotonic() + 20
            while len(steps) < 2000 and time.monotonic() < deadline:
                if (pulse := read_pulse(file)) is None:
                    assert steps == [0], "what was heard once stays"
                    continue
                assert pulse.phase == ("saving", "training")[pulse.step % 2]
                assert pulse.step >= steps[-1]
                steps.append(pulse.step)
        finally:
            writer.kill()
    assert len(set(steps)) > 2


def test_a_rank_that_is_asked_writes_its_stacks_and_goes_on(file: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from penstock_trainer.heartbeat import Heart\n"
        "def look_for_a_sample():\n"
        "    print('waits', flush=True); sys.stdin.read()\n"
        "Heart(Path(sys.argv[1])); look_for_a_sample()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(file)],
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "waits\n"
        rank.send_signal(TRACEBACK_SIGNAL)
        time.sleep(0.2)
        _, told = rank.communicate()
    assert rank.returncode == 0
    assert "in look_for_a_sample" in told


def silent(
    rank: int,
    *,
    step: int = 13,
    beats: int = 2,
    main_thread: ThreadState = "waiting",
    since: float = 100.0,
    phase: Phase = "training",
) -> RankEnd:
    pulse = Pulse(phase=phase, step=step, beats=beats, age_seconds=62.3)
    silence = Silence(pulse=pulse, main_thread=main_thread, since=since)
    return read_end(rank, -9, Path("nowhere"), stopped=True, ended_at=200.0, silence=silence)


def test_the_end_of_a_silent_rank_says_what_was_last_heard() -> None:
    end = silent(1, main_thread="stopped")
    assert (end.outcome, end.reported, end.step) == ("retryable", False, 13)
    assert end.error == "no sign of life for 62 s in training step 13; its main thread is stopped"
    verdict = decide([end])
    assert (verdict.exit_code, verdict.reason) == (134, f"rank 1 hung: {end.error}")


def test_it_reaches_the_primary_as_it_is() -> None:
    told = NodeEnd(ranks=(silent(1), silent(2, main_thread="stopped")), told_to_stop=False)
    assert from_dict(NodeEnd, load_json(canonical_json(told), "an end")) == told


def test_what_a_rank_has_reported_before_it_fell_silent_stands(tmp_path: Path) -> None:
    (tmp_path / "rank-1.json").write_text('{"outcome": "preempted", "step": 14}')
    silence = silent(1).silence
    end = read_end(1, -9, tmp_path / "rank-1.json", stopped=True, ended_at=0.0, silence=silence)
    assert (end.outcome, end.step, end.silence) == ("preempted", 14, None)


@pytest.mark.parametrize(
    ("behind", "others"),
    [
        # Whoever is a step behind is waited for, whatever the clocks of two nodes say.
        (silent(1, step=12, since=101.0), [silent(0), silent(2, main_thread="stopped")]),
        # In one step, a stopped process; then who has beaten less, as a loader that does not end.
        (silent(1, main_thread="stopped", since=101.0), [silent(0, beats=1), silent(2)]),
        (silent(1, beats=1, since=101.0), [silent(0), silent(2)]),
        (silent(1, since=99.0), [silent(0), silent(2)]),
    ],
)
def test_of_ranks_that_all_wait_the_one_behind_is_the_cause(behind: RankEnd, others: list[RankEnd]) -> None:
    assert decide([*others, behind]).reason.startswith("rank 1 hung")


def end_of(rank: int, **told: object) -> RankEnd:
    return from_dict(
        RankEnd,
        {"rank": rank, "outcome": "retryable", "reported": True, "stopped": False, "ended_at": 1.0} | told,
    )


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (end_of(0), "rank 1 hung"),  # a peer's connection broke when the silent one was killed
        (end_of(0, reported=False, stopped=True), "rank 1 hung"),
        (end_of(0, outcome="failed"), "rank 0 failed"),
        (end_of(0, reported=False), "rank 0 was lost"),  # and rank 1 waits for it
    ],
)
def test_a_hang_is_the_cause_of_what_peers_report_and_not_of_what_failed_by_itself(
    other: RankEnd, reason: str
) -> None:
    assert decide([other, silent(1)]).reason.startswith(reason)


def test_a_rank_has_the_time_of_its_collectives_and_the_budget_of_its_config() -> None:
    config = JobConfig(
        engine=EngineConfig(timeout_seconds=90), checkpoint=CheckpointConfig(preemption_seconds=11.0)
    )
    timing = trainer_timing(config)
    assert timing.hung_seconds > 90  # their own errors come first, and say more
    assert timing == Timing(save_seconds=11.0, hung_seconds=120.0)


def test_without_a_config_nobody_is_killed_for_silence() -> None:
    assert Timing().hung_seconds == float("inf")
