"""CustomJobs over REST: what replicas are given, and what their ends mean."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from contract.vertex.stand_in import IMAGE, Rest

JOBS = "v1/projects/demo/locations/us-central1/customJobs"
SLEEP = "import time; time.sleep(60)"
WAIT = "\nimport os, pathlib, time\nwhile not pathlib.Path(os.environ['DONE']).exists(): time.sleep(0.05)"

# Says `first`; when it is started again it says `again` and does what `{then}` is.
TWICE = """
import pathlib, time
again = pathlib.Path("was here").exists()
pathlib.Path("was here").touch()
print("again" if again else "first", flush=True)
if again:
    {then}
else:
    time.sleep(60)
"""


def pool(code: str, *, env: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "machineSpec": {"machineType": "n1-standard-4"},
        "replicaCount": "1",
        "containerSpec": {
            "imageUri": f"{IMAGE}:v1",
            "command": ["python", "-c", code],
            "env": [{"name": name, "value": value} for name, value in (env or {}).items()],
        },
        **fields,
    }


def job(*pools: dict[str, Any], scheduling: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    job_spec = {"workerPoolSpecs": list(pools), **spec}
    if scheduling:
        job_spec["scheduling"] = scheduling
    return {"displayName": "a job", "jobSpec": job_spec}


def create(rest: Rest, *pools: dict[str, Any], scheduling: dict[str, Any] | None = None) -> str:
    name: str = rest.call("POST", JOBS, job(*pools, scheduling=scheduling))["name"]
    return name


def is_running(pid: int) -> bool:
    """Not so for a process that has ended and that nobody has asked about yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_replicas_of_three_pools_are_told_of_each_other(rest: Rest, tmp_path: Path) -> None:
    say = (
        "import os; print(os.environ['CLUSTER_SPEC']); "
        "print('rank', os.environ.get('RANK'), 'of', os.environ.get('WORLD_SIZE'), flush=True)"
    )
    pools = [pool(say + WAIT, env={"DONE": str(tmp_path / "done")}), *[pool(f"{say}; {SLEEP}")] * 2]
    name = create(rest, *pools)
    ranks = {
        "workerpool0-0": "rank 0 of 2",
        "workerpool1-0": "rank 1 of 2",
        "workerpool2-0": "rank None of None",
    }
    told = {replica: rest.wait_for_line(name, replica, rank) for replica, rank in ranks.items()}
    (tmp_path / "done").touch()
    done = rest.wait_until(name, "SUCCEEDED")

    assert [p["containerSpec"]["command"] for p in done["jobSpec"]["workerPoolSpecs"]] == [
        p["containerSpec"]["command"] for p in pools
    ]
    specs = {replica: json.loads(lines[0]) for replica, lines in told.items()}
    [cluster] = {json.dumps(spec["cluster"]) for spec in specs.values()}
    assert sorted(json.loads(cluster)) == ["workerpool0", "workerpool1", "workerpool2"]
    assert [spec["task"] for spec in specs.values()] == [
        {"type": f"workerpool{number}", "index": 0} for number in range(3)
    ]


def test_a_failing_replica_fails_the_job_with_its_last_lines(rest: Rest) -> None:
    fail = "import sys; print('loading'); sys.stdout.flush(); sys.exit('no such shard')"
    name = create(rest, pool(SLEEP), pool(fail), scheduling={"restartJobOnWorkerRestart": True})
    error = rest.wait_until(name, "FAILED")["error"]
    assert error["code"] == 3  # INVALID_ARGUMENT
    assert "workerpool1-0 exited with a non-zero status of 1" in error["message"]
    assert "loading" in error["message"]
    assert "no such shard" in error["message"]
    assert rest.lines(name, "workerpool1-0").count("loading") == 1  # exit code 1 is permanent


def test_a_killed_replica_restarts_the_whole_job_when_asked_to(rest: Rest) -> None:
    end, sleep = TWICE.format(then="pass"), TWICE.format(then="time.sleep(60)")
    name = create(rest, pool(end), pool(sleep), scheduling={"restartJobOnWorkerRestart": True})
    rest.wait_for_line(name, "workerpool0-0", "first")
    rest.wait_for_line(name, "workerpool1-0", "first")
    rest.control(
        "POST", "faults:signal", {"customJob": name, "replica": "workerpool1-0", "signal": "SIGKILL"}
    )
    rest.wait_until(name, "SUCCEEDED")
    assert rest.lines(name, "workerpool0-0") == ["first", "again"]
    killed = rest.lines(name, "workerpool1-0")
    assert killed[:3] == [
        "first",
        "fault injected: SIGKILL",
        "workerpool1-0 ended with status 137; the whole job restarts",
    ]


def test_a_killed_replica_restarts_alone_otherwise(rest: Rest, tmp_path: Path) -> None:
    env = {"DONE": str(tmp_path / "done")}
    primary = "print('first', flush=True)" + WAIT
    worker = TWICE.format(then="import os; pathlib.Path(os.environ['DONE']).touch()")
    name = create(rest, pool(primary, env=env), pool(worker, env=env))
    rest.wait_for_line(name, "workerpool1-0", "first")
    rest.control(
        "POST", "faults:signal", {"customJob": name, "replica": "workerpool1-0", "signal": "SIGTERM"}
    )
    rest.wait_until(name, "SUCCEEDED")
    assert rest.lines(name, "workerpool0-0") == ["first"]
    assert "workerpool1-0 ended with status 143; workerpool1-0 restarts" in rest.lines(name, "workerpool1-0")


def test_exit_code_134_after_sigterm_has_the_job_retried(rest: Rest) -> None:
    save = "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), os._exit(134)))\n"
    name = create(rest, pool(save + TWICE.format(then="pass")))
    rest.wait_for_line(name, "workerpool0-0", "first")
    rest.control(
        "POST", "faults:signal", {"customJob": name, "replica": "workerpool0-0", "signal": "SIGTERM"}
    )
    rest.wait_until(name, "SUCCEEDED")
    lines = rest.lines(name)
    assert [line for line in lines if line in ("first", "saved", "again")] == ["first", "saved", "again"]


def test_a_fault_for_a_replica_that_does_not_run_is_not_found(rest: Rest) -> None:
    name = create(rest, pool(SLEEP))
    fault = {"customJob": name, "replica": "workerpool3-0", "signal": "SIGKILL"}
    response = rest.session.post(f"{rest.control_url}/faults:signal", json=fault)
    assert (response.status_code, response.json()["error"]["status"]) == (404, "NOT_FOUND")
    response = rest.session.post(f"{rest.control_url}/faults:signal", json={**fault, "signal": "SIGNOPE"})
    assert response.status_code == 400
    rest.call("POST", f"v1/{name}:cancel", {})
    rest.wait_until(name, "CANCELLED")


def test_a_job_that_outlives_its_timeout_fails(rest: Rest) -> None:
    error = rest.wait_until(create(rest, pool(SLEEP), scheduling={"timeout": "1s"}), "FAILED")["error"]
    assert error["code"] == 4  # DEADLINE_EXCEEDED
    assert "longer than its timeout of 0:00:01" in error["message"]


def test_cancel_ends_every_process_also_those_in_sessions_of_their_own(rest: Rest) -> None:
    tree = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    name = create(rest, pool(tree))
    child = int(rest.first_line(name))
    assert is_running(child)
    rest.call("POST", f"v1/{name}:cancel", {})
    done = rest.wait_until(name, "CANCELLED")
    assert "error" not in done
    assert not is_running(child)
    rest.call("POST", f"v1/{name}:cancel", {})  # an ended job stays as it is
    assert rest.call("GET", f"v1/{name}")["state"] == "JOB_STATE_CANCELLED"


def test_a_program_that_cannot_be_started_fails_the_job(rest: Rest) -> None:
    nothing = pool(SLEEP)
    nothing["containerSpec"]["command"] = ["no-such-program"]
    error = rest.wait_until(create(rest, nothing), "FAILED")["error"]
    assert "could not be started" in error["message"]
    assert "no-such-program" in error["message"]


@pytest.mark.parametrize(
    ("posted", "code", "told"),
    [
        (job(pool(SLEEP), network="projects/1/global/networks/x"), 501, ["customJob.jobSpec.network "]),
        (job(pool(SLEEP), persistentResourceId="x"), 501, ["customJob.jobSpec.persistentResourceId "]),
        (job(pool(SLEEP), enableWebAccess=True), 501, ["customJob.jobSpec.enableWebAccess "]),
        (job(pool(SLEEP), reservedIpRanges=["x"]), 501, ["customJob.jobSpec.reservedIpRanges "]),
        (job(pool(SLEEP), pscInterfaceConfig={"networkAttachment": "x"}), 501, [".pscInterfaceConfig "]),
        (
            job(pool(SLEEP), pool(SLEEP, nfsMounts=[{"server": "a", "path": "/b", "mountPoint": "c"}])),
            501,
            ["customJob.jobSpec.workerPoolSpecs[1].nfsMounts "],
        ),
        (
            job({"replicaCount": "1", "pythonPackageSpec": {"pythonModule": "x"}}),
            400,
            ["customJob.jobSpec.workerPoolSpecs[0].pythonPackageSpec.executorImageUri", "image '' is not"],
        ),
        (
            job(
                pool(
                    SLEEP, machineSpec={"reservationAffinity": {"reservationAffinityType": "ANY_RESERVATION"}}
                )
            ),
            501,
            ["customJob.jobSpec.workerPoolSpecs[0].machineSpec.reservationAffinity "],
        ),
        (job(pool(SLEEP), lustre=1), 400, ["lustre"]),
        (job(), 400, ["customJob.jobSpec.workerPoolSpecs is empty"]),
        (job(*[pool(SLEEP)] * 5), 400, ["5 pools", "at most 4"]),
        (job(pool(SLEEP, replicaCount="2")), 400, ["workerPoolSpecs[0].replicaCount is 2", "into pool 1"]),
        (job(pool(SLEEP), pool(SLEEP, replicaCount="-1")), 400, ["workerPoolSpecs[1].replicaCount is -1"]),
        (
            job(
                pool(SLEEP), pool(SLEEP, containerSpec={"imageUri": "gcr.io/x/y@sha256:0", "command": ["z"]})
            ),
            400,
            ["customJob.jobSpec.workerPoolSpecs[1].containerSpec.imageUri", "'gcr.io/x/y@sha256:0'", IMAGE],
        ),
        (job(pool(SLEEP, containerSpec={"imageUri": IMAGE})), 400, ["containerSpec.command is empty"]),
        ({"jobSpec": job(pool(SLEEP))["jobSpec"]}, 400, ["customJob.displayName is empty"]),
    ],
)
def test_what_cannot_be_run_is_refused_by_the_path_of_its_field(
    rest: Rest, posted: dict[str, Any], code: int, told: Sequence[str]
) -> None:
    status, message = rest.refusal("POST", JOBS, posted)
    assert status == code
    assert all(part in message for part in told), message


def test_empty_messages_as_launchers_send_them_are_not_taken_for_values(rest: Rest) -> None:
    name = rest.call("POST", JOBS, job(pool("pass"), pscInterfaceConfig={}, network="", reservedIpRanges=[]))[
        "name"
    ]
    rest.wait_until(name, "SUCCEEDED")


def test_jobs_are_listed_newest_first_by_filter_and_page(rest: Rest) -> None:
    label = f"t{os.urandom(4).hex()}"
    names = []
    for number in range(3):
        posted = {**job(pool("pass")), "displayName": f"{label}-{number}", "labels": {"run-id": label}}
        names.append(rest.call("POST", JOBS, posted)["name"])
    for name in names:
        rest.wait_until(name, "SUCCEEDED")
    query = {"filter": f'labels."run-id"="{label}" AND state="JOB_STATE_SUCCEEDED"', "pageSize": 2}
    first = rest.call("GET", JOBS, **query)
    second = rest.call("GET", JOBS, **query, pageToken=first["nextPageToken"])
    assert [j["name"] for j in first["customJobs"] + second["customJobs"]] == names[::-1]
    assert "nextPageToken" not in second
    assert rest.refusal("GET", JOBS, filter="state = ")[0] == 400
    assert rest.refusal("GET", JOBS, pageToken="x")[0] == 400


def test_an_ended_job_can_be_deleted_and_is_gone(rest: Rest) -> None:
    name = create(rest, pool(SLEEP))
    assert rest.refusal("DELETE", f"v1/{name}")[0] == 400
    rest.call("POST", f"v1/{name}:cancel", {})
    rest.wait_until(name, "CANCELLED")
    assert rest.call("DELETE", f"v1/{name}")["done"]
    assert rest.refusal("GET", f"v1/{name}")[0] == 404


def test_a_method_that_is_not_implemented_is_not_found(rest: Rest) -> None:
    status, message = rest.refusal("GET", "v1/projects/demo/locations/us-central1/endpoints")
    assert status == 404
    assert "not a method" in message
    assert rest.refusal("GET", "v1/projects/other/locations/us-central1/customJobs")[0] == 400
