"""`penstock check`: what it prints, and with which code it ends."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from compiled import ROOT, compiled
from penstock_pipelines.check import read_document
from penstock_pipelines.cli import main
from penstock_pipelines.errors import InputError

JOBS = ROOT / "tests" / "golden" / "jobs"
SETTINGS = ["--settings", str(ROOT / "penstock.toml")]


def check(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [*SETTINGS, "check", *map(str, arguments)], catch_exceptions=False)


def broken(path: Path) -> Path:
    text = (JOBS / "a100-reduction-server.yaml").read_text()
    path.write_text(
        text.replace("replicaCount: 1\n", "replicaCount: 2\n").replace(
            "acceleratorCount: 8", "acceleratorCount: 3"
        )
    )
    return path


def test_a_good_file_ends_with_0_and_a_bad_one_with_1_and_every_fault(tmp_path: Path) -> None:
    good = check(JOBS / "gb200-reserved.yaml")
    assert (good.exit_code, good.output.splitlines()[-1]) == (
        0,
        f"{JOBS / 'gb200-reserved.yaml'}: CustomJob, 0 errors, 0 warnings",
    )
    bad = check(broken(tmp_path / "bad.yaml"))
    assert bad.exit_code == 1
    assert "error  jobSpec.workerPoolSpecs[0].replicaCount  [primary-replicas]" in bad.output
    assert "error  jobSpec.workerPoolSpecs[1].machineSpec.acceleratorCount" in bad.output


def test_json_has_the_same_findings(tmp_path: Path) -> None:
    told = json.loads(check(broken(tmp_path / "bad.yaml"), "--json").output)
    assert (told["kind"], told["num_jobs"]) == ("CustomJob", 1)
    assert set(told["findings"][0]) == {"path", "rule", "reason", "fix", "severity"}
    assert told["changes"] is None


def test_a_recipe_and_the_file_that_it_compiles_to_are_judged_alike() -> None:
    recipe, file = check("tiny-zero2"), check(compiled("tiny-zero2"))
    assert (recipe.exit_code, file.exit_code) == (0, 0)
    assert recipe.output.splitlines()[:-1] == file.output.splitlines()[:-1]
    assert "2 nodes a Reduction Server brings nothing" in recipe.output
    assert ": pipeline with 1 training job, 0 errors, " in file.output.splitlines()[-1]


def test_a_pipeline_without_a_training_job_is_said_to_have_none(tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text("pipelineInfo: {name: other}\nroot: {dag: {tasks: {}}}\n")
    told = check(path)
    assert told.output.splitlines() == [f"{path}: pipeline with no training job, 0 errors, 0 warnings"]


def test_against_an_older_file_the_differences_read_like_a_review(tmp_path: Path) -> None:
    new = tmp_path / "new.yaml"
    new.write_text((JOBS / "h100-flex-start.yaml").read_text().replace("replicaCount: 3", "replicaCount: 7"))
    rate = ["--epoch-tokens", 1e12, "--tokens-per-second", 10_000]
    told = check(new, "--against", JOBS / "h100-flex-start.yaml", *map(str, rate))
    assert told.exit_code == 0
    assert told.output.splitlines()[-3:] == [
        "2 differences:",
        "  machines 4 -> 8 x a3-highgpu-8g",
        "  hours per epoch 868 -> 434",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such.yaml"], "no-such.yaml is not a file"),
        (["tiny-zero"], "Did you mean 'tiny-zero2'?"),
        ([str(JOBS / "gb200-reserved.yaml"), "--epoch-tokens", "1"], "go together"),
    ],
)
def test_wrong_input_ends_with_2(arguments: list[str], message: str) -> None:
    told = check(*arguments)
    assert told.exit_code == 2
    assert message in told.output


def test_a_file_that_can_be_no_spec_is_not_read(tmp_path: Path) -> None:
    large, binary = tmp_path / "large.json", tmp_path / "binary.yaml"
    with large.open("wb") as file:
        file.truncate(50 * 2**20)
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in ((large, "has 50 MiB"), (binary, "cannot be read as text")):
        told = check(path)
        assert told.exit_code == 2
        assert message in told.output


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["job.json", "job.yaml"])
def test_files_from_windows_are_read(tmp_path: Path, encoding: str, name: str) -> None:
    text = (JOBS / "gb200-reserved.yaml").read_text()
    if name.endswith(".json"):
        text = json.dumps(yaml.safe_load(text))
    mark = "\ufeff" if encoding in ("utf-16-le", "utf-16-be") else ""
    path = tmp_path / name
    path.write_bytes((mark + text).replace("\n", "\r\n").encode(encoding))
    told = check(path)
    assert (told.exit_code, told.output) == (0, f"{path}: CustomJob, 0 errors, 0 warnings\n")


def test_a_dash_reads_the_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (JOBS / "gb200-reserved.yaml").read_text()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode("utf-8-sig"))))
    assert read_document(Path("-")) == text
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\x00" * (33 * 2**20))))
    with pytest.raises(InputError, match="standard input has more than"):
        read_document(Path("-"))
