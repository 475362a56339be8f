"""Pools, replicas, programs, environments and command lines that do not work, one fault at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock_components.jobs.messages import ContainerSpec, EnvVar, MachineSpec, WorkerPoolSpec
from unit.penstock_components.jobs.rules.specs import (
    A100,
    CPU,
    GOOD,
    PACKAGE,
    RESTARTS,
    container,
    findings,
    job,
    nodes,
    pool,
    refused,
    warned,
    with_command,
    with_env,
)


def test_a_job_without_pools_is_told_to_give_the_primary() -> None:
    refused(
        replace(job(), worker_pool_specs=()), "worker_pool_specs", "pool-count", "no worker pool", "pool 0"
    )


def test_a_fifth_pool_is_refused_and_the_four_places_are_named() -> None:
    refused(
        job(*[pool()] * 5), "worker_pool_specs", "pool-count", "5 pools", "1 to 4", "0 primary, 1 workers"
    )


def test_an_empty_first_pool_is_refused() -> None:
    refused(job(WorkerPoolSpec(), pool()), "worker_pool_specs[0]", "primary-missing", "pool 0 is empty")


def test_a_primary_of_four_is_told_to_put_three_into_the_workers() -> None:
    refused(
        job(pool(A100, 4), scheduling=RESTARTS),
        "worker_pool_specs[0].replica_count",
        "primary-replicas",
        "pool 0 has 4 replicas",
        "put the other 3 into pool 1",
    )


def test_a_primary_without_a_count_is_told_to_have_one() -> None:
    refused(
        job(pool(replicas=0)), "worker_pool_specs[0].replica_count", "primary-replicas", "0 replicas", "to 1"
    )


def test_workers_without_a_count_are_refused() -> None:
    refused(
        job(pool(), pool(replicas=0)), "worker_pool_specs[1].replica_count", "replica-count", "0 replicas"
    )


def test_an_empty_pool_may_hold_a_place() -> None:
    assert findings(job(pool(), WorkerPoolSpec(), pool())) == []


def test_an_empty_pool_is_lost_on_the_way_through_gcpc_and_the_pools_behind_it_move() -> None:
    refused(
        job(pool(), WorkerPoolSpec(), pool()),
        "worker_pool_specs[1]",
        "empty-pool-through-gcpc",
        "drops empty pools",
        "pool 2 would become pool 1 (workers)",
        "at least one replica",
        through_gcpc=True,
    )


def test_empty_pools_through_gcpc_are_one_fault_told_by_the_pool_that_moves() -> None:
    spec = job(pool(), WorkerPoolSpec(), WorkerPoolSpec(), pool(), WorkerPoolSpec())
    (finding,) = [
        each for each in findings(spec, through_gcpc=True) if each.rule == "empty-pool-through-gcpc"
    ]
    assert finding.path == "worker_pool_specs[1]"
    assert "pool 3 would become pool 1 (workers)" in finding.reason
    assert "pool 1 and pool 2" in finding.fix


def test_an_empty_pool_at_the_end_is_no_fault_through_gcpc() -> None:
    assert findings(job(pool(), WorkerPoolSpec()), through_gcpc=True) == []


def test_a_pool_that_runs_nothing_is_refused() -> None:
    refused(
        job(WorkerPoolSpec(machine_spec=CPU, replica_count=1)),
        "worker_pool_specs[0].container_spec",
        "task-missing",
        "runs nothing",
        "image_uri",
    )


def test_container_and_package_exclude_each_other() -> None:
    both = replace(pool(), python_package_spec=PACKAGE)
    refused(job(both), "worker_pool_specs[0]", "one-of", "container_spec and python_package_spec")


@pytest.mark.parametrize(
    ("image", "rule", "word"),
    [("", "required", "Artifact Registry"), ("https://gcr.io/p/i", "image-uri", "Write gcr.io/p/i.")],
)
def test_a_container_needs_an_image(image: str, rule: str, word: str) -> None:
    bare = job(pool(container_spec=ContainerSpec(image_uri=image)))
    refused(bare, "worker_pool_specs[0].container_spec.image_uri", rule, word)


@pytest.mark.parametrize(
    ("field", "value", "rule", "words"),
    [
        ("executor_image_uri", "", "required", ("prebuilt",)),
        ("python_module", "", "required", ("trainer.task",)),
        ("python_module", "trainer/task.py", "python-module", ("python -m", "Write trainer.task.")),
        ("python_module", "-m trainer", "python-module", ("dotted name",)),
        ("package_uris", (), "package-count", ("0 packages", "1 to 100")),
        ("package_uris", PACKAGE.package_uris * 101, "package-count", ("101 packages",)),
    ],
)
def test_a_package_needs_its_image_its_uris_and_its_module(
    field: str, value: object, rule: str, words: tuple[str, ...]
) -> None:
    package = replace(PACKAGE, **{field: value})
    path = f"worker_pool_specs[0].python_package_spec.{field}"
    refused(job(pool(python_package_spec=package)), path, rule, *words)


def test_a_package_on_a_disk_is_refused() -> None:
    package = replace(PACKAGE, package_uris=("dist/trainer.tar.gz",))
    path = "worker_pool_specs[0].python_package_spec.package_uris[0]"
    refused(job(pool(python_package_spec=package)), path, "package-uri", "not in Cloud Storage", "gs://")


def test_an_image_of_yours_for_a_package_is_a_warning() -> None:
    package = replace(PACKAGE, executor_image_uri="europe-docker.pkg.dev/project/trainers/trainer:1")
    path = "worker_pool_specs[0].python_package_spec.executor_image_uri"
    warned(job(pool(python_package_spec=package)), path, "executor-image", "prebuilt", "container_spec")


def test_a_hundred_variables_are_taken_and_one_more_is_not() -> None:
    assert findings(with_env(**{f"V{index}": "1" for index in range(100)})) == []
    refused(
        with_env(**{f"V{index}": "1" for index in range(101)}),
        "worker_pool_specs[0].container_spec.env",
        "env-count",
        "101 variables",
        "100",
    )


def test_a_variable_that_stands_twice_is_refused() -> None:
    env = (EnvVar(name="A", value="1"), EnvVar(name="B"), EnvVar(name="A", value="2"))
    path = "worker_pool_specs[0].container_spec.env[2].name"
    refused(job(pool(container_spec=container(env=env))), path, "env-twice", "A stands twice, at 0 and 2")


@pytest.mark.parametrize("name", ["", "A=1"])
def test_a_variable_needs_a_name(name: str) -> None:
    env = (EnvVar(name=name, value="1"),)
    path = "worker_pool_specs[0].container_spec.env[0].name"
    refused(job(pool(container_spec=container(env=env))), path, "env-name", repr(name))


def test_a_line_for_a_shell_is_no_command() -> None:
    refused(
        with_command("python -m train --nodes=$WORLD_SIZE"),
        "worker_pool_specs[0].container_spec.command[0]",
        "command-shell-line",
        "exec form",
        '["bash", "-c"',
    )


def test_a_line_for_a_shell_is_not_told_since_it_may_hold_a_secret() -> None:
    assert "s3cr3t" not in "".join(each.told() for each in findings(with_command("login s3cr3t && train")))


def test_a_variable_without_a_shell_is_not_expanded() -> None:
    refused(
        with_command("torchrun", "--nnodes=2", "--master_addr=$MASTER_ADDR", args=("train.py",)),
        "worker_pool_specs[0].container_spec.command[2]",
        "command-variable",
        "$MASTER_ADDR would reach the program as it stands: no shell starts this program",
        "CLUSTER_SPEC",
    )


def test_a_variable_for_an_unknown_entry_point_is_a_warning() -> None:
    warned(
        with_command(args=("--data=${DATA_DIR}/train",)),
        "worker_pool_specs[0].container_spec.args[0]",
        "command-variable",
        "${DATA_DIR}",
        "entry point is rarely a shell",
    )


@pytest.mark.parametrize(
    "command",
    [
        ("bash", "-c", "torchrun --master_addr=$MASTER_ADDR train.py"),
        ("/usr/bin/env", "sh", "-ec", "exec train $HOME"),
        ("python", "-m", "train", "--dir=$(AIP_MODEL_DIR)"),
        ("python", "-m", "train", "--pattern=^a$", "--price=5$", "--text=$$HOME"),
        ("python", "-m", "train", "{{$.inputs.parameters['config']}}"),
    ],
)
def test_what_is_expanded_elsewhere_or_is_no_variable_is_left_alone(command: tuple[str, ...]) -> None:
    assert findings(with_command(*command)) == []


def test_every_fault_of_a_spec_is_told_in_one_pass() -> None:
    spec = job(
        pool(MachineSpec(machine_type="n1-standard-7"), replicas=2),
        pool(container_spec=ContainerSpec()),
        network="projects/p/global/networks/n",
    )
    assert {each.rule for each in findings(spec)} == {
        "primary-replicas",
        "required",
        "machine-type",
        "network-form",
    }


def test_workers_of_good_specs_may_be_many() -> None:
    assert findings(nodes(A100, 64)) == []
    assert all(spec.worker_pool_specs for spec, _ in GOOD.values())
