"""Schedules that hang, wait or stop otherwise than meant, one fault at a time."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from penstock_components.jobs.messages import CustomJobSpec, EnvVar, MachineSpec, Scheduling, WorkerPoolSpec
from unit.penstock_components.jobs.rules.specs import (
    A100,
    CPU,
    H100,
    L4,
    OUTPUT,
    PACKAGE,
    REDUCED,
    RESERVATION,
    RESTARTS,
    container,
    findings,
    job,
    nodes,
    pool,
    refused,
    warned,
)

T4 = MachineSpec(machine_type="n1-standard-8", accelerator_type="NVIDIA_TESLA_T4", accelerator_count=1)
FLEX = replace(RESTARTS, strategy="FLEX_START")


@pytest.mark.parametrize(("old", "new"), [("ON_DEMAND", "STANDARD"), ("LOW_COST", "SPOT")])
def test_a_deprecated_strategy_is_a_warning_that_names_the_new_one(old: str, new: str) -> None:
    spec = job(scheduling=Scheduling(strategy=old))
    warned(spec, "scheduling.strategy", "strategy-deprecated", f"{old} is deprecated", f"Write {new}.")


def test_a_strategy_of_the_documentation_that_is_no_name_of_the_api_is_refused() -> None:
    spec = job(scheduling=Scheduling(strategy="DWS_FLEX_START"))
    refused(spec, "scheduling.strategy", "enum", "'DWS_FLEX_START' is no strategy", "Write FLEX_START.")


@pytest.mark.parametrize(
    ("timeout", "word"),
    [
        (timedelta(days=7, seconds=1), "7 days"),
        (timedelta(days=30), "resume from its checkpoint"),
        (timedelta(0), "no running time"),
        (timedelta(seconds=-5), "no running time"),
    ],
)
def test_a_job_runs_seven_days_at_most(timeout: timedelta, word: str) -> None:
    refused(job(scheduling=Scheduling(timeout=timeout)), "scheduling.timeout", "timeout", word)


def test_seven_days_are_taken() -> None:
    assert findings(job(scheduling=Scheduling(timeout=timedelta(days=7)))) == []


@pytest.mark.parametrize("strategy", ["", "STANDARD", "SPOT"])
def test_only_flex_start_waits(strategy: str) -> None:
    spec = job(
        scheduling=Scheduling(strategy=strategy, max_wait_duration=timedelta(hours=2)),
        base_output_directory=OUTPUT,
    )
    path = "scheduling.max_wait_duration"
    refused(spec, path, "max-wait-strategy", strategy or "STANDARD", "FLEX_START")


def test_the_wait_that_the_op_has_by_default_is_no_fault() -> None:
    spec = job(scheduling=Scheduling(strategy="STANDARD", max_wait_duration=timedelta(days=1)))
    assert findings(spec, through_gcpc=True) == []
    refused(spec, "scheduling.max_wait_duration", "max-wait-strategy", "STANDARD")
    longer = replace(spec, scheduling=Scheduling(max_wait_duration=timedelta(days=2)))
    refused(longer, "scheduling.max_wait_duration", "max-wait-strategy", "STANDARD", through_gcpc=True)


def test_a_schedule_of_the_run_is_not_judged_before_it() -> None:
    wait = Scheduling(max_wait_duration=timedelta(hours=2))
    servers = job(pool(L4), pool(L4), pool(), scheduling=FLEX)
    later = "{{$.inputs.parameters['strategy']}}"
    for spec in (job(scheduling=wait), job(pool(T4), scheduling=FLEX), servers):
        assert findings(spec, unknown=frozenset({"scheduling.strategy"})) == []
        assert findings(replace(spec, scheduling=replace(spec.scheduling or wait, strategy=later))) == []
    fixed = nodes(A100, 2, scheduling=Scheduling())
    unknown = frozenset({"scheduling.restart_job_on_worker_restart"})
    assert findings(fixed, unknown=unknown, strategy="ddp") == []
    long = job(scheduling=Scheduling(timeout=timedelta(days=30)))
    assert findings(long, unknown=frozenset({"scheduling.timeout"})) == []


def test_flex_start_waits_for_ever_but_not_less() -> None:
    assert findings(job(pool(L4), scheduling=replace(FLEX, max_wait_duration=timedelta(0)))) == []
    spec = job(pool(L4), scheduling=replace(FLEX, max_wait_duration=timedelta(seconds=-1)))
    refused(spec, "scheduling.max_wait_duration", "max-wait", "waits for ever")


def test_flex_start_wants_one_kind_of_machine() -> None:
    spec = job(pool(A100), pool(L4), scheduling=FLEX, base_output_directory=OUTPUT)
    refused(
        spec,
        "worker_pool_specs[1].machine_spec",
        "flex-start-machines",
        "g2-standard-24 with 2 x NVIDIA_L4 is not a2-highgpu-8g with 8 x NVIDIA_TESLA_A100",
    )


@pytest.mark.parametrize(
    ("machine", "word"),
    [
        (CPU, "machines without GPUs"),
        (T4, "NVIDIA_TESLA_T4"),
    ],
)
def test_flex_start_has_gpus_of_five_families(machine: MachineSpec, word: str) -> None:
    refused(
        job(pool(machine), scheduling=FLEX),
        "worker_pool_specs[0].machine_spec.machine_type",
        "flex-start-accelerator",
        word,
        "NVIDIA_L4",
        "NVIDIA_B200",
    )


@pytest.mark.parametrize(
    ("pools", "path", "rule"),
    [
        ((MachineSpec(machine_type="a3-highgpu-9g"),), "0].machine_spec.machine_type", "machine-type"),
        ((A100, MachineSpec(machine_type="a3-highgpu-9g")), "1].machine_spec.machine_type", "machine-type"),
        ((MachineSpec(),), "0].machine_spec.machine_type", "required"),
        (
            (
                MachineSpec(
                    machine_type="a2-highgpu-1g", accelerator_type="NVIDIA_TESLA_T4", accelerator_count=1
                ),
            ),
            "0].machine_spec.accelerator_type",
            "accelerator-type",
        ),
        (
            (A100, replace(A100, accelerator_count=4)),
            "1].machine_spec.accelerator_count",
            "accelerator-count",
        ),
        (
            (replace(A100, accelerator_count=4), A100),
            "0].machine_spec.accelerator_count",
            "accelerator-count",
        ),
    ],
)
def test_flex_start_adds_nothing_to_a_machine_that_does_not_exist(
    pools: tuple[MachineSpec, ...], path: str, rule: str
) -> None:
    spec = job(*map(pool, pools), scheduling=FLEX, base_output_directory=OUTPUT)
    refused(spec, f"worker_pool_specs[{path}", rule)


def test_flex_start_wants_the_machines_of_the_nodes_for_servers_and_evaluators_too() -> None:
    servers = job(pool(L4), pool(L4), pool(), scheduling=FLEX)
    refused(servers, "worker_pool_specs[2].machine_spec", "flex-start-machines")
    evaluators = job(pool(L4), pool(L4), WorkerPoolSpec(), pool(), scheduling=FLEX)
    refused(evaluators, "worker_pool_specs[3].machine_spec", "flex-start-machines")
    refused(
        replace(evaluators, base_output_directory=OUTPUT),
        "worker_pool_specs[3].machine_spec",
        "flex-start-machines",
        strategy="ddp",
    )


def test_flex_start_takes_nothing_out_of_a_reservation() -> None:
    spec = job(pool(replace(H100, reservation_affinity=RESERVATION)), scheduling=FLEX)
    path = "worker_pool_specs[0].machine_spec.reservation_affinity"
    refused(spec, path, "flex-start-reservation", "no machine out of a reservation")


RESTART_PATH = "scheduling.restart_job_on_worker_restart"
LAUNCH = ("python", "-m", "penstock_trainer", "launch")


def running(*command: str, args: tuple[str, ...] = (), machine: MachineSpec = L4) -> CustomJobSpec:
    program = container(command=command, args=args)
    return job(
        pool(machine, container_spec=program),
        pool(machine, 3, container_spec=program),
        base_output_directory=OUTPUT,
    )


@pytest.mark.parametrize(
    "spec",
    [
        running(*LAUNCH, "--max-restarts=3", "--", "python", "train.py"),
        running(*LAUNCH, "--", "python", "train.py", "--nodes=1:4"),
        running(
            "/opt/python3.11", "-u", "-m", "penstock_trainer", args=("launch", "--", "python", "train.py")
        ),
        running("bash", "-c", 'source /x && exec "$0" "$@"', *LAUNCH, "--", "python", "train.py"),
        running("torchrun", "--nnodes=4", "--nproc_per_node=1", "train.py"),
        running("/usr/bin/env", "torchrun", "--nnodes", "4", "--rdzv_backend", "static", "train.py"),
        running("python", "-m", "torch.distributed.run", "--nnodes=4:4", "train.py"),
        running("torchrun", f"--nnodes={'9' * 5000}", "train.py"),
        running("sh", "-c", "cd /app\nNCCL_DEBUG=INFO exec torchrun \\\n --nnodes=4 train.py; sleep 1"),
        running("deepspeed", "--hostfile=hosts", "train.py"),
        running(args=("torchrun", "--nnodes=4", "train.py")),
        replace(running(*LAUNCH, "--", "python", "train.py", machine=CPU)),
        replace(REDUCED, scheduling=Scheduling()),
    ],
)
def test_a_rendezvous_of_all_nodes_has_to_restart_together(spec: CustomJobSpec) -> None:
    refused(spec, RESTART_PATH, "restart-job", "NCCL group", "cannot join", "Set it to true")


def test_a_package_that_our_launcher_starts_has_to_restart_together() -> None:
    package = replace(PACKAGE, python_module="penstock_trainer", args=("launch", "--", "python", "train.py"))
    pools = (pool(L4, python_package_spec=package), pool(L4, 3, python_package_spec=package))
    refused(job(*pools, base_output_directory=OUTPUT), RESTART_PATH, "restart-job", "NCCL group")


@pytest.mark.parametrize(
    "spec",
    [
        nodes(A100, 2, scheduling=Scheduling()),
        job(pool(T4), pool(T4), base_output_directory=OUTPUT),
        job(pool(L4), pool(L4), WorkerPoolSpec(), pool()),
        running("python", "batch_predict.py"),
        running("torchrun", "--nnodes=4", "--rdzv-backend=c10d", "train.py"),
        running("torchrun", "--nproc-per-node=1", "predict.py"),
        running("bash", "-c", "torchrun --nnodes=$NODES train.py"),
        running("deepspeed", "--num_nodes=1", "predict.py"),
        running("deepspeed", "--num_gpus=1", "predict.py"),
        running("python", "train.py", "--launcher", "deepspeed"),
        running("python", "train.py", "torchrun", "--nnodes=4"),
    ],
)
def test_other_gpus_on_several_nodes_are_warned_that_they_may_be_one_group(spec: CustomJobSpec) -> None:
    warned(
        spec, RESTART_PATH, "restart-job", "NCCL group", "cannot join", "batch inference", "Set it to true"
    )


@pytest.mark.parametrize(
    "spec",
    [
        running(*LAUNCH, "--nodes=1:4", "--", "python", "train.py"),
        running(*LAUNCH, "--max-restarts", "3", "--nodes", "1:4", "--", "python", "train.py"),
        running("torchrun", "--nnodes=1:4", "--max-restarts=3", "--rdzv-backend=c10d", "train.py"),
        running("bash", "-c", "exec torchrun --nnodes 1:4 train.py"),
        running("python", "batch_predict.py", machine=CPU),
        replace(running("torchrun", "--nnodes=1:4", "train.py"), scheduling=Scheduling(disable_retries=True)),
    ],
)
def test_nodes_that_come_and_go_and_nodes_without_gpus_may_restart_alone(spec: CustomJobSpec) -> None:
    assert findings(spec) == []


def test_our_trainer_on_several_cpu_nodes_has_to_restart_together_as_well() -> None:
    spec = nodes(CPU, 2, scheduling=Scheduling())
    refused(spec, "scheduling.restart_job_on_worker_restart", "restart-job", strategy="ddp")
    assert findings(spec) == []


def test_a_backend_by_environment_may_let_nodes_come_and_go() -> None:
    program = container(
        command=("torchrun", "--nnodes=2", "a.py"), env=(EnvVar(name="PET_RDZV_BACKEND", value="c10d"),)
    )
    spec = job(pool(L4, container_spec=program), pool(L4, container_spec=program))
    warned(spec, RESTART_PATH, "restart-job")


def test_one_node_and_parameter_servers_need_no_restart_of_the_job() -> None:
    assert findings(job(pool(A100)), strategy="fsdp-full") == []
    assert findings(job(pool(L4), pool(L4, 3), pool(replicas=2))) == []


def test_retries_cannot_be_off_where_the_nodes_have_to_restart_together() -> None:
    unknown = nodes(A100, 2, scheduling=Scheduling(disable_retries=True))
    warned(unknown, "scheduling.disable_retries", "disable-retries-group", "batch inference")
    spec = replace(
        running("torchrun", "--nnodes=4", "a.py"), scheduling=replace(RESTARTS, disable_retries=True)
    )
    refused(
        spec,
        "scheduling.disable_retries",
        "disable-retries-group",
        "sets restart_job_on_worker_restart to false",
        "Remove disable_retries",
    )


def test_retries_off_and_restarts_on_contradict_each_other() -> None:
    spec = job(scheduling=replace(RESTARTS, disable_retries=True))
    refused(spec, "scheduling.disable_retries", "disable-retries-restart", "Keep one")
    assert findings(job(scheduling=Scheduling(disable_retries=True))) == []


def test_spot_on_a_persistent_resource_is_a_warning_that_says_it_is_not_documented() -> None:
    spec = job(
        persistent_resource_id="shared", scheduling=Scheduling(strategy="SPOT"), base_output_directory=OUTPUT
    )
    warned(spec, "scheduling.strategy", "spot-persistent-resource", "not documented")
