from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock_local.jobs.images import ImageMap, LocalImage
from penstock_local.jobs.processes import ProcessRecord
from penstock_local.logs import LogStore
from penstock_local.orchestrator.executor import TaskExit, TaskLaunch, path_in_view, view_root
from penstock_local.storage import ObjectStore
from penstock_local.tasks.executor import TASK_REPLICA, ProcessExecutor, main_job_id


class Bench:
    """An executor and what it keeps."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.logs = LogStore(directory / "logs")
        self.objects = ObjectStore(directory / "objects")
        self.objects.create_bucket("bucket")
        image = LocalImage(
            repository="python", python=Path(sys.executable), env={"WHO": "image", "LEVEL": "image"}
        )
        self.executor = ProcessExecutor(
            ImageMap({"python": image}),
            self.logs,
            self.objects,
            ProcessRecord(directory / "processes"),
            {"WHO": "client", "PROXY": "client"},
        )

    def launch(self, code: str, *args: str, **fields: Any) -> TaskLaunch:
        work_dir = self.directory / "work"
        work_dir.mkdir()
        given: dict[str, Any] = {
            "pipeline_job_name": "p",
            "component_name": "c",
            "task_name": "t",
            "task_id": "7",
            "attempt": 1,
            "image": "python:3",
            "command": ("python", "-c", code),
            "args": args,
            "env": {"LEVEL": "task"},
            "executor_input": {},
            "work_dir": work_dir,
            **fields,
        }
        return TaskLaunch(**given)

    def run(self, code: str, *args: str, **fields: Any) -> TaskExit:
        return self.executor.run(self.launch(code, *args, **fields), threading.Event())

    @property
    def lines(self) -> list[str]:
        return self.logs.last_lines(job_id=main_job_id("7", 1), task_name=TASK_REPLICA, count=100)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.logs.close()
    bench.objects.close()


def test_a_task_runs_in_its_folder_with_args_and_the_nearest_environment(bench: Bench) -> None:
    say = "import os, sys; print(os.getcwd(), sys.argv[1:], *(os.environ[n] for n in ('PROXY', 'WHO', 'LEVEL')))"
    assert bench.run(say, "--a", "b c") == TaskExit(0, "")
    assert bench.lines == [f"{bench.directory / 'work'} ['--a', 'b c'] client image task"]


def test_a_failed_task_tells_its_last_lines(bench: Bench) -> None:
    ended = bench.run("import sys; [print(n) for n in range(30)]; sys.stdout.flush(); sys.exit(3)")
    assert ended.exit_code == 3
    assert ended.message.splitlines() == [str(number) for number in range(10, 30)]


def test_a_cancelled_task_is_told_by_sigterm(bench: Bench) -> None:
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); print('ready', flush=True); time.sleep(60)"
    cancelled, ended = threading.Event(), []
    launch = bench.launch(code)
    runner = threading.Thread(target=lambda: ended.append(bench.executor.run(launch, cancelled)))
    runner.start()
    deadline = time.monotonic() + 10
    while not bench.lines:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    cancelled.set()
    runner.join(10)
    assert ended[0].exit_code == 5


ARTIFACT = {"outputs": {"artifacts": {"out": {"artifacts": [{"uri": "gs://bucket/run/out"}]}}}}
# Writes where kfp says that a gs:// URI lies; the marker makes it a lightweight task.
WRITE = """
# kfp.dsl.executor_main
import sys
from pathlib import Path
from kfp.dsl.types import artifact_types
path = Path(artifact_types.Artifact(uri="gs://bucket/run/out").path)
path.parent.mkdir(parents=True)
path.write_text("written")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("code", "kept"), [(0, ["run/out"]), (1, [])])
def test_what_a_lightweight_task_writes_below_gcs_is_kept_when_it_succeeds(
    bench: Bench, code: int, kept: list[str]
) -> None:
    assert bench.run(WRITE, str(code), executor_input=ARTIFACT).exit_code == code, bench.lines
    assert [found.name for found in bench.objects.list("bucket").objects] == kept


@pytest.mark.parametrize(("code", "kept"), [(0, ["data", "run/out"]), (1, ["data"])])
def test_a_container_that_is_given_paths_of_artifacts_finds_and_leaves_them_in_a_view(
    bench: Bench, code: int, kept: list[str]
) -> None:
    bench.objects.put("bucket", "data", b"an input")
    copy = """
import sys
from pathlib import Path
_, source, target, code = sys.argv
Path(target).parent.mkdir(parents=True)
Path(target).write_text(Path(source).read_text())
sys.exit(int(code))
"""
    told = {"inputs": {"artifacts": {"in": {"artifacts": [{"uri": "gs://bucket/data"}]}}}, **ARTIFACT}
    root = view_root(bench.directory / "work")
    paths = [path_in_view(root, uri) for uri in ("gs://bucket/data", "gs://bucket/run/out")]
    assert bench.run(copy, *paths, str(code), executor_input=told).exit_code == code, bench.lines
    assert [found.name for found in bench.objects.list("bucket").objects] == kept
    assert not root.exists()


def test_each_attempt_has_a_main_job_and_none_has_the_tasks_id() -> None:
    ids = {main_job_id("7", attempt) for attempt in (1, 2)} | {main_job_id("8", 1)}
    assert len(ids - {"7", "8"}) == 3
    assert all(number.isdigit() for number in ids)


def test_other_containers_get_no_view_and_no_hook(bench: Bench) -> None:
    assert bench.run("import os; print({'PENSTOCK_GCS_VIEW', 'PYTHONPATH'} & set(os.environ))").exit_code == 0
    assert bench.lines == ["set()"]
