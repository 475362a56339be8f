"""faults.yaml, and the judgement of what a run with faults left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from compiled import ROOT
from penstock_pipelines.errors import InputError
from penstock_pipelines.fault_evidence import Evidence, Row, Saved, judge, lines_of, losses_of
from penstock_pipelines.faults import OrderedFault, read_faults
from penstock_pipelines.faults_table import print_rows, to_json
from penstock_pipelines.logs import LogLine
from penstock_trainer.contract.events import StepEvent

EXAMPLES = sorted((ROOT / "pipelines" / "examples" / "faults").glob("*.yaml"))
KILL_RANK = {"do": "kill", "process": "rank", "rank": 1, "at_step": 3}
RESTARTED = "restart 1 of 3: rank 1 was lost or lost its peers: died by signal 9 (Killed)"
CONTINUED = "continuing from step 2 of gs://bucket/root"
GLOBAL_BATCH = 8


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "faults.yaml"
    path.write_text(text)
    return path


def ordered(tmp_path: Path, *faults: dict[str, Any]) -> tuple[OrderedFault, ...]:
    return read_faults(written(tmp_path, json.dumps({"faults": faults})))


def log(*told: Any) -> list[LogLine]:
    """A line a second: a text, or a step (its loss is that of the clean run) or a (step, loss)."""
    return [
        LogLine(
            insert_id=str(second),
            timestamp=f"2026-01-01T00:00:{second:02}+00:00",
            severity="INFO",
            replica="workerpool0-0",
            payload=each if isinstance(each, str) else step(*each) if isinstance(each, tuple) else step(each),
        )
        for second, each in enumerate(told)
    ]


def step(number: int, loss: float | None = None) -> Any:
    event = StepEvent(
        step=number,
        steps=5,
        loss=1 / number if loss is None else loss,
        learning_rate=0.1,
        grad_norm=1.0,
        tokens_per_second=1.0,
    )
    return json.loads(event.to_line())


def struck(second: int, *, requests: int = 0, at: int | None = 3) -> dict[str, Any]:
    """A fault's state, as the control API tells it."""
    moment = f"2026-01-01T00:00:{second:02}.5+00:00"
    return {
        "kind": "",
        "state": "over",
        "struck_at": moment,
        "over_at": moment,
        "step": at,
        "what": "done",
        "requests": requests,
    }


def saved(number: int, *, is_whole: bool = True, samples: int | None = None) -> Saved:
    expected = number * GLOBAL_BATCH
    return Saved(
        step=number,
        is_whole=is_whole,
        samples_seen=expected if samples is None else samples,
        expected_samples=expected,
        keep_last=2,
    )


def evidence(lines: Sequence[LogLine], *, succeeded: bool = True, **more: Any) -> Evidence:
    clean = losses_of(lines_of(log(1, 2, 3, 4, 5)))
    return Evidence(
        **{
            "lines": lines_of(lines),
            "clean_losses": clean,
            "saved": (saved(4),),
            "succeeded": succeeded,
            **more,
        }
    )


DISTURBED = (1, 2, 3, RESTARTED, CONTINUED, 3, 4, 5)


def row_of(tmp_path: Path, fault: dict[str, Any], found: Evidence, **state: Any) -> Row:
    [row] = judge(ordered(tmp_path, fault), [struck(2, **state)], found)
    return row


def test_a_killed_rank_is_told_by_what_noticed_it_and_what_it_cost(tmp_path: Path) -> None:
    row = row_of(tmp_path, KILL_RANK, evidence(log(*DISTURBED)))
    assert row.detected_by == f"workerpool0-0: {RESTARTED}"
    assert row.restarted_in == "ranks in place"
    assert (row.steps_lost, row.samples_off) == (1, 0)
    assert row.seconds_to_new_step == 2.5
    assert (row.losses, row.verdict, row.ok) == ("equal (3)", "ok", True)


def test_a_loss_that_differs_in_its_last_bit_is_told_by_its_step(tmp_path: Path) -> None:
    other = (4, 0.25 + 2**-54)
    row = row_of(tmp_path, KILL_RANK, evidence(log(*DISTURBED[:6], other, 5)))
    assert (row.losses, row.ok) == ("differ from step 4", False)


SAVED_4 = "saved step 4 to gs://b in 1 s"


@pytest.mark.parametrize(
    ("told", "more", "verdict"),
    [
        (DISTURBED, {"saved": (saved(4, samples=24),)}, "8 samples repeated or skipped"),
        (DISTURBED, {"succeeded": False, "error": "no peer\nmore"}, "the run failed: no peer"),
        (DISTURBED[:-1], {}, "1 steps were never logged"),
        ((*DISTURBED, SAVED_4), {"saved": (saved(5),)}, "committed and lost: steps 4"),
        ((*DISTURBED, SAVED_4), {"saved": (saved(4, is_whole=False),)}, "committed and lost: steps 4"),
    ],
)
def test_what_must_not_happen_is_the_verdict(
    tmp_path: Path, told: tuple[Any, ...], more: dict[str, Any], verdict: str
) -> None:
    row = row_of(tmp_path, KILL_RANK, evidence(log(*told), **more))
    assert (row.verdict, row.ok) == (verdict, False)


def test_checkpoints_that_retention_has_deleted_are_not_lost(tmp_path: Path) -> None:
    lines = log(*DISTURBED, *(f"saved step {number} to gs://b in 1 s" for number in (2, 3, 4)))
    row = row_of(tmp_path, KILL_RANK, evidence(lines, saved=(saved(4), saved(3))))
    assert row.ok


def test_a_step_that_was_saved_and_not_logged_is_not_taken_for_skipped(tmp_path: Path) -> None:
    fault = {"do": "preempt", "replica": "workerpool1-0", "notice_seconds": 30, "at_step": 3}
    told = "SIGTERM: ranks have 25 s to save"
    lines = log(
        1, 2, 3, told, "x ended with status 134; the whole job restarts", CONTINUED.replace("2", "4"), 5
    )
    found = evidence(lines, clean_losses={step: 1 / step for step in (1, 2, 3, 5)})
    row = row_of(tmp_path, fault, found)
    assert (row.steps_lost, row.restarted_in, row.ok) == (0, "whole job", True)
    assert told in row.detected_by


def test_two_kills_have_a_restart_each(tmp_path: Path) -> None:
    again = RESTARTED.replace("1 of", "2 of")
    lines = log(*DISTURBED[:-1], again, "continuing from step 4 of gs://bucket/root", 5)
    faults = ordered(tmp_path, KILL_RANK, {**KILL_RANK, "at_step": 4})
    first, second = judge(faults, [struck(2), struck(6, at=4)], evidence(lines))
    assert RESTARTED in first.detected_by
    assert again in second.detected_by
    assert (first.steps_lost, second.steps_lost) == (1, 0)


def test_a_lost_writer_stops_nothing(tmp_path: Path) -> None:
    noticed = "the writer of rank 0 was lost (exit code -9); starting another"
    fault = {"do": "kill", "process": "writer", "rank": 0, "at_step": 3}
    row = row_of(tmp_path, fault, evidence(log(1, 2, 3, 4, noticed, 5)))
    assert (row.restarted_in, row.steps_lost, row.ok) == ("its writer", 0, True)
    assert noticed in row.detected_by


def test_requests_that_are_tried_again_need_no_restart(tmp_path: Path) -> None:
    fault = {"do": "storage", "kind": "refuse", "requests": 9, "at_step": 3}
    row = row_of(tmp_path, fault, evidence(log(1, 2, 3, 4, 5)), requests=9)
    assert row.detected_by == "the storage client, which asked again"
    assert (row.restarted_in, row.done, row.ok) == ("not needed", "done (9 struck)", True)


def test_a_permanent_fault_has_to_end_the_job_and_to_say_why(tmp_path: Path) -> None:
    fault = {"do": "storage", "kind": "read-only", "at_step": 3}
    reason = "step 4 was not saved: gs://b/x: not permitted (403)"
    ended = evidence(log(1, 2, 3, 4, reason), succeeded=False, error="exited with 1")
    row = row_of(tmp_path, fault, ended, requests=1)
    assert (row.restarted_in, row.verdict, row.ok) == ("ended", "ended, nothing committed was lost", True)
    assert reason in row.detected_by
    silent = row_of(tmp_path, fault, evidence(log(1, 2, 3, 4), succeeded=False), requests=1)
    assert (silent.verdict, silent.ok) == ("nothing in the log says why the job ended", False)
    went_on = row_of(tmp_path, fault, evidence(log(1, 2, 3, 4, reason, 5)), requests=1)
    assert (went_on.verdict, went_on.ok) == ("the run went on, and should have ended", False)


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        (KILL_RANK, "nothing in the log shows that it was noticed"),
        ({"do": "storage", "kind": "slow", "at_step": 3}, "struck no request; see its `match`"),
    ],
)
def test_a_fault_that_left_nothing_behind_is_a_finding(
    tmp_path: Path, fault: dict[str, Any], verdict: str
) -> None:
    row = row_of(tmp_path, fault, evidence(log(1, 2, 3, 4, 5)))
    assert (row.verdict, row.ok) == (verdict, False)


def test_a_fault_that_did_not_strike_is_a_finding(tmp_path: Path) -> None:
    never = {**struck(0, at=None), "struck_at": "", "state": "missed", "what": ""}
    [row] = judge(ordered(tmp_path, KILL_RANK), [never], evidence(log(1, 2, 3, 4, 5)))
    assert (row.verdict, row.ok) == ("did not strike: the job ended before its time came", False)


def test_the_table_and_its_json_tell_the_same(tmp_path: Path) -> None:
    row = row_of(tmp_path, KILL_RANK, evidence(log(*DISTURBED)))
    console = Console(width=240, record=True, file=(tmp_path / "out").open("w"))
    print_rows(console, [row])
    shown = console.export_text()
    console.file.close()
    for told in ("kill rank 1", "ranks in place", "2.5 s", "equal (3)", "ok"):
        assert told in shown
    told = json.loads(to_json([row], ok=True))
    assert told["ok"]
    assert told["faults"][0]["steps_lost"] == 1


def test_where_lines_have_no_width_the_table_is_not_cut_into_syllables(tmp_path: Path) -> None:
    row = row_of(tmp_path, KILL_RANK, evidence(log(*DISTURBED)))
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    print_rows(console, [row])
    shown = console.export_text()
    console.file.close()
    assert "kill rank 1" in shown
    assert f"1  detected by: workerpool0-0: {RESTARTED}" in shown


def test_each_fault_of_the_examples_has_a_name_of_its_own() -> None:
    for path in EXAMPLES:
        names = [fault.name for fault in read_faults(path)]
        assert len(set(names)) == len(names), names


def test_processes_are_told_by_their_command_lines(tmp_path: Path) -> None:
    rank, launcher, damage = ordered(
        tmp_path,
        KILL_RANK,
        {"do": "kill", "process": "launcher", "replica": "workerpool1-0", "at_step": 1},
        {"do": "damage", "how": "flip", "at_step": 1},
    )
    assert rank.order == {
        "do": "kill", "command": r"-m penstock_trainer\.rank( |$)", "environment": {"RANK": "1"}, "at_step": 3
    }  # fmt: skip
    assert launcher.order["command"] == r"-m penstock_trainer( --|$)"
    assert damage.order["beside"] == r"/step-\d+/manifest\.json$"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("faults: [", "is not YAML"),
        ("[]", "must have one field, `faults`, with a list; it has no fields but []"),
        ("fault: []", "it has fault."),
        ("faults: []", "faults is empty"),
        ("faults: [kill]", "faults[0] is 'kill'; it must be fields of which `do` says what is done"),
        ("faults: [{do: kill, process: wrter, rank: 1}]", "Did you mean 'writer'?"),
        ("faults: [{do: hang, process: writer, rank: 1}]", "hang takes rank there"),
        ("faults: [{do: storage, match: 2026-01-01}]", "neither text nor number nor true"),
        ("faults: [{do: kill, process: rank, at_step: 1}]", "faults[0].rank is None; it must be a rank"),
        ("faults: [{do: kill, process: launcher, at_step: 1}]", "faults[0].replica is missing"),
        ("faults: [{do: kill, process: launcher, rank: 0}]", "a launcher has none"),
    ],
)
def test_a_bad_file_is_told_by_the_path_of_its_field(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        read_faults(written(tmp_path, text))
    assert told in str(caught.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_faults(tmp_path / "none.yaml")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_stand_in_takes_what_the_examples_order(path: Path) -> None:
    from penstock_local.faults.spec import parse_order

    faults = read_faults(path)
    parsed = parse_order({"labels": {}, "faults": [dict(fault.order) for fault in faults]})
    assert len(parsed.faults) == len(faults) > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--json"], "--json tells the table of --faults FILE; give that too."),
        (["--faults", "bad.yaml"], "faults[0].process is 'rnk'"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(
    tmp_path: Path, arguments: list[str], told: str
) -> None:
    (tmp_path / "bad.yaml").write_text("faults: [{do: kill, process: rnk, rank: 1, at_step: 3}]")
    settings = ["--settings", str(ROOT / "penstock.toml")]
    command = [*settings, "run", "tiny-fsdp", "--state", "state", *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "penstock_pipelines.cli", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert told in done.stderr
    assert not (tmp_path / "state").exists()
