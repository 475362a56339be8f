"""Reading what people write: whatever it is, nothing is raised, one fault is one finding, and what is meant is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from google.protobuf.json_format import ParseError
from hypothesis import HealthCheck, given, settings, strategies

from penstock_components.jobs import messages as custom_job
from penstock_components.jobs import study
from penstock_components.jobs.check import check_document, check_message
from penstock_components.jobs.findings import Finding, in_case
from penstock_components.jobs.messages import (
    ContainerSpec,
    CustomJob,
    CustomJobSpec,
    EnvVar,
    Message,
    Scheduling,
    WorkerPoolSpec,
)
from penstock_components.jobs.reader import Reading, read
from penstock_components.jobs.rules.context import Context
from penstock_components.jobs.schema import Field, fields_of
from penstock_components.jobs.study import (
    DoubleValueSpec,
    HyperparameterTuningJob,
    IntegerValueSpec,
    ParameterSpec,
    StudyStoppingConfig,
)
from penstock_components.jobs.wire import to_api
from unit.penstock_components.jobs.protos import proto_of

RANDOM = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
HUGE = int("f" * 5000, 16)
"""Longer than Python writes out."""
ODD = [
    None, True, 0, 1, -1, 2.5, 1e17, 1e300, float("inf"), float("-inf"), float("nan"), 10**20, 10**400, HUGE, "", "0", "3", "1e0",
    "nan", "3600s", "999999999999s", "99999999999999999999s", "-5s", "1.s", "\ud800", "x" * 3000, "A=b", "{{$.inputs.x}}",
    "NVIDIA_L4", "g2-standard-12", "gs://b/x", "true", {}, [], {"seconds": 10**20}, {"seconds": HUGE, "nanos": 1},
    {"seconds": "x"}, {0: "a", 1: "b"}, {"0": {}}, {"a": 1}, {HUGE: HUGE}, {None: None}, (1, 2), b"x", timedelta(days=1), {1, 2},
]  # fmt: skip
KINDS = [
    kind
    for module in (custom_job, study)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
]
NAMES = sorted(
    {spec.name for kind in KINDS for spec in fields_of(kind)} | {"state", "name", "gpus", "replicas"}
)
KEYS = strategies.sampled_from([*NAMES, *(in_case(name, "camel") for name in NAMES), "0", "x" * 3000, "a\nb", "\ud800"])  # fmt: skip


def anything(depth: int = 0) -> strategies.SearchStrategy[Any]:
    odd = strategies.sampled_from(ODD)
    if depth > 4:
        return odd
    below = strategies.deferred(lambda: anything(depth + 1))
    return odd | strategies.lists(below, max_size=3) | strategies.dictionaries(KEYS, below, max_size=4)


def like(kind: type[Message], depth: int = 0) -> strategies.SearchStrategy[Any]:
    """Mappings with fields of a message in either case, mostly with the messages that belong there, and anything else."""

    def value_of(field: Field) -> strategies.SearchStrategy[Any]:
        if not field.is_message or depth > 7:
            return anything(4)
        one = strategies.deferred(lambda: like(field.type, depth + 1))
        return anything(3) | one | (strategies.lists(one, max_size=3) if field.is_repeated else one)

    fields = {case: {} for case in ("snake", "camel")}  # type: dict[str, dict[str, Any]]
    for field in fields_of(kind):
        for case, held in fields.items():
            held[in_case(field.name, case)] = value_of(field)  # type: ignore[arg-type]
    mappings = [strategies.fixed_dictionaries({}, optional=each) for each in fields.values()]
    stray = strategies.dictionaries(KEYS, anything(3), max_size=2)
    return strategies.builds(
        lambda held, more, is_mixed: held | more if is_mixed else held,
        strategies.one_of(*mappings),
        stray,
        strategies.booleans(),
    )


@pytest.mark.parametrize("kind", [CustomJob, CustomJobSpec, HyperparameterTuningJob])
@RANDOM
@given(data=strategies.data())
def test_nothing_is_raised_whatever_a_document_holds(
    kind: type[Message], data: strategies.DataObject
) -> None:
    value = data.draw(like(kind) | anything())
    case: Any = data.draw(strategies.sampled_from(["snake", "camel"]))
    reading = read(kind, value, case=case)
    assert isinstance(reading.message, kind)
    assert all(len(finding.told()) < 3000 for finding in reading.findings)
    check_message(kind, value, case=case, context=Context())
    for finding in check_document(value).findings:
        finding.told().encode()  # what cannot be encoded cannot be printed


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_field_takes_every_odd_value_with_one_finding_at_most(kind: type[Message]) -> None:
    for field in fields_of(kind):
        for odd in ODD:
            reading = read(kind, {field.name: odd}, case="snake")
            assert len(reading.findings) <= 1 or isinstance(odd, (Mapping, list, tuple)), (field.name, odd)
            read(kind, {field.name: [odd]}, case="snake")
            read(kind, {field.name: {"name": odd}}, case="camel")


def test_a_document_without_end_is_one_finding() -> None:
    value: dict[str, Any] = {}
    parameter = value
    for _ in range(400):
        below: dict[str, Any] = {}
        parameter["conditional_parameter_specs"] = [{"parameter_spec": below}]
        parameter = below
    (finding,) = read(ParameterSpec, value, case="snake").findings
    assert finding.rule == "too-deep"


def found(pool: Any, **more: Any) -> Reading[CustomJobSpec]:
    return read(CustomJobSpec, {"workerPoolSpecs": [pool], **more}, case="camel")


def told(pool: Any) -> list[Finding]:
    """Faults of a pool, of form and of content."""
    good = {"machineSpec": {"machineType": "n1-standard-4"}, "replicaCount": 1}
    spec = {
        "workerPoolSpecs": [good | pool],
        "baseOutputDirectory": {"outputUriPrefix": "gs://bucket/run"},
    }
    return list(check_document(spec).findings)


IMAGE = {"imageUri": "europe-docker.pkg.dev/p/r/i:1"}


@pytest.mark.parametrize(
    ("pool", "path", "rule", "words"),
    [
        ({"containerSpec": "image"}, "containerSpec", "message-expected", "a mapping with imageUri, command, args, env"),
        ({"containerSpec": IMAGE, "machineSpec": "n1-standard-4"}, "machineSpec", "message-expected", "machineType"),
        ({"containerSpec": IMAGE, "machineSpec": {"acceleratorType": "NVIDIA_L4", "acceleratorCount": 1}, "machineType": "g2-standard-12"}, "machineType", "field-level", "machineSpec: {machineType}"),
        ({"containerSpec": IMAGE, "diskSpec": [100]}, "diskSpec", "message-expected", "bootDiskSizeGb"),
        ({"containerSpec": IMAGE | {"env": {"LR": 0.1, "B": "c"}}}, "containerSpec.env", "list-expected", '[{name: LR, value: "..."}]'),
        ({"containerSpec": IMAGE | {"env": {"A": {"b": "c"}}}}, "containerSpec.env", "list-expected", "{name: A"),
        ({"containerSpec": IMAGE | {"env": ["C=d"]}}, "containerSpec.env[0]", "message-expected", '{name: C, value: "..."}'),
        ({"containerSpec": IMAGE | {"env": ["C"]}}, "containerSpec.env[0]", "message-expected", "name, value"),
        ({"containerSpec": IMAGE | {"env": [{"C": "d"}]}}, "containerSpec.env[0]", "message-expected", '{name: C, value: "..."}'),
        ({"containerSpec": IMAGE | {"env": {"name": "A", "value": "b"}}}, "containerSpec.env", "list-expected", "[ ]"),
        ({"containerSpec": IMAGE | {"env": {0: {"name": "A", "value": "b"}}}}, "containerSpec.env", "list-expected", "without the numbers"),
        ({"containerSpec": IMAGE | {"env": "A=b"}}, "containerSpec.env", "list-expected", "[{name: ..., value: ...}]"),
        ({"containerSpec": IMAGE | {"args": "--x"}}, "containerSpec.args", "list-expected", "[ ]"),
        ({"containerSpec": IMAGE | {"args": "--lr 0.1"}}, "containerSpec.args", "list-expected", "each word into [ ]"),
        ({"containerSpec": IMAGE | {"command": "python train.py"}}, "containerSpec.command", "list-expected", "each word into [ ]"),
        ({"containerSpec": IMAGE | {"command": "cd x && python train.py"}}, "containerSpec.command", "list-expected", '["bash", "-c"'),
        ({"containerSpec": IMAGE | {"args": 3}}, "containerSpec.args", "list-expected", "[ ]"),
        ({"containerSpec": IMAGE | {"args": {"lr": 0.1}}}, "containerSpec.args", "list-expected", "[...]"),
        ({"containerSpec": IMAGE | {"args": [None]}}, "containerSpec.args[0]", "text-expected", '""'),
        ({"containerSpec": IMAGE, "nfsMounts": {"data": {"server": "x"}}}, "nfsMounts", "list-expected", "[{server: ..., path: ..., mountPoint: ...}]"),
    ],
)  # fmt: skip
def test_what_has_the_wrong_form_is_one_finding_with_the_right_one(
    pool: Any, path: str, rule: str, words: str
) -> None:
    (finding,) = told(pool)
    assert (finding.path, finding.rule) == (f"workerPoolSpecs[0].{path}", rule)
    assert words in finding.fix


@pytest.mark.parametrize("pools", ["x", 3, {"primary": {}}, [3], ["x", "y"]])
def test_pools_of_the_wrong_form_are_told_once_each(pools: Any) -> None:
    spec = {"workerPoolSpecs": pools, "baseOutputDirectory": {"outputUriPrefix": "gs://bucket/run"}}
    findings = check_document(spec).findings
    assert {each.rule for each in findings} <= {"list-expected", "message-expected"}
    assert len(findings) == (len(pools) if isinstance(pools, list) else 1)


def test_names_and_values_are_read_as_meant() -> None:
    for env in (
        {"A": "b", "C": 1, "D": None},
        [{"A": "b"}, {"C": "1"}, "D="],
        {0: {"name": "A", "value": "b"}, 1: {"name": "C", "value": "1"}, 2: {"name": "D"}},
    ):
        (pool,) = found({"containerSpec": IMAGE | {"env": env}}).message.worker_pool_specs
        assert pool.container_spec is not None
        assert pool.container_spec.env == (
            EnvVar(name="A", value="b"),
            EnvVar(name="C", value="1"),
            EnvVar(name="D"),
        )


def test_a_line_in_place_of_a_list_is_read_as_its_words() -> None:
    (pool,) = found({"containerSpec": IMAGE | {"args": "--lr 0.1"}}).message.worker_pool_specs
    assert pool.container_spec is not None
    assert pool.container_spec.args == ("--lr", "0.1")


def test_a_misspelt_key_of_env_is_still_a_misspelt_key() -> None:
    reading = found({"containerSpec": {"env": [{"nam": "A"}, {"valueFrom": {}}]}})
    assert reading.findings[0].fix == "Write 'name'."
    assert "Secret Manager" in reading.findings[1].fix


def test_a_secret_in_a_wrong_form_is_not_repeated() -> None:
    for env in (
        "WANDB_API_KEY=s3cr3t",
        ["WANDB_API_KEY=s3cr3t"],
        {"WANDB_API_KEY": "s3cr3t"},
        [{"WANDB_API_KEY": "s3cr3t"}],
    ):
        assert not [each for each in told({"containerSpec": IMAGE | {"env": env}}) if "s3cr3t" in each.told()]


TAKEN = [
    (DoubleValueSpec, "minValue", ["0.0001", "1e-4", "3", "-2.5E3", "Infinity", "-Infinity", "inf", 1, 1.5, " 2"]),
    (IntegerValueSpec, "minValue", ["3", "-3", "3.0", "1e0", "1e3", "+3", 3, 3.0, str(2**63 - 1)]),
    (IntegerValueSpec, "defaultValue", ["3", 3]),
    (HyperparameterTuningJob, "maxTrialCount", ["3", "3.0", "1e1", 3, 3.0]),
    (Scheduling, "strategy", ["SPOT", "4", 4, 4.0, "0", 0, "STRATEGY_UNSPECIFIED"]),
    (Scheduling, "timeout", ["3600s", "0.5s", "+5s", "-5s", "0s", "1.s", "315576000000s", "0.000001s", "0.000001000s"]),
    (Scheduling, "disableRetries", [True, False]),
    (ContainerSpec, "args", [[], ["a"]]),
]  # fmt: skip
REFUSED = [
    (DoubleValueSpec, "minValue", ["x", "nan", "", [], {}, 10**400]),
    (IntegerValueSpec, "minValue", ["x", "3.5", "", "1 0", 3.5, True, 2**63, "1e30", float("inf")]),
    (HyperparameterTuningJob, "maxTrialCount", [2**31, "2147483648"]),
    (Scheduling, "strategy", ["spot?", "x", "", []]),
    (Scheduling, "timeout", ["3600", "1h", "s", "315576000001s", "99999999999999999999s", 3600, 10**20, float("inf"), float("nan"), 1e17]),
    (Scheduling, "disableRetries", ["true", 1, "yes"]),
    (ContainerSpec, "args", [["\ud800"], [1], [None], {}, "a"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "value"), [(kind, name, value) for kind, name, values in TAKEN for value in values]
)
def test_what_protobufs_own_reader_takes_is_taken_as_the_same(
    kind: type[Message], name: str, value: Any
) -> None:
    proto = proto_of(kind)
    real = proto.from_json(json.dumps({name: value}))
    reading = read(kind, {name: value}, case="camel")
    assert [each for each in reading.findings if each.severity == "error"] == []
    written = json.loads(proto.to_json(real, use_integers_for_enums=False))
    assert read(kind, written, case="camel").message == reading.message


@pytest.mark.parametrize(
    ("kind", "name", "value"), [(kind, name, value) for kind, name, values in REFUSED for value in values]
)
def test_what_protobufs_own_reader_refuses_is_one_error(kind: type[Message], name: str, value: Any) -> None:
    if value != "" or kind is not Scheduling:  # an empty enumeration is what a pipeline has for none
        with pytest.raises((ParseError, OverflowError, ValueError)):
            proto_of(kind).from_json(json.dumps({name: value}))
        (finding,) = read(kind, {name: value}, case="camel").findings
        assert finding.severity == "error"


def test_a_number_as_text_in_snake_case_is_a_warning_as_google_s_classes_take_few() -> None:
    reading = read(WorkerPoolSpec, {"replica_count": "3"}, case="snake")
    assert [(each.severity, each.fix) for each in reading.findings] == [
        ("warning", "Write 3, without quotes.")
    ]
    reading = read(DoubleValueSpec, {"min_value": "1e-10"}, case="snake")
    assert [(each.severity, each.fix) for each in reading.findings] == [
        ("warning", "Write 1.0e-10, without quotes.")
    ]


def test_what_gcpc_makes_of_a_tuning_jobs_parameters_has_no_finding() -> None:
    """serialize_parameters of google-cloud-pipeline-components 2.22 calls to_dict, whose 64-bit integers are texts."""
    spec = ParameterSpec(
        parameter_id="n", scale_type="UNIT_LINEAR_SCALE", integer_value_spec=IntegerValueSpec(min_value=1)
    )
    proto = proto_of(ParameterSpec)
    made = proto.to_dict(proto(to_api(spec)))
    assert made["integer_value_spec"]["min_value"] == "1"
    reading = read(ParameterSpec, made, case="snake")
    assert (reading.message, reading.findings) == (spec, ())


def test_a_duration_finer_than_a_microsecond_says_that_it_is_not_kept() -> None:
    for value in ("0.0000001s", {"seconds": 1, "nanos": 1}):
        reading = read(StudyStoppingConfig, {"max_duration_no_progress": value}, case="snake")
        assert [each.reason.partition(", ")[2] for each in reading.findings] == [
            "finer than a microsecond, which is not kept here."
        ]
        assert reading.unread == {"max_duration_no_progress"}


def test_a_bare_number_of_seconds_is_read_and_told_how_to_write() -> None:
    reading = read(Scheduling, {"timeout": 3600.0, "max_wait_duration": {"seconds": 60}}, case="snake")
    assert [each.fix for each in reading.findings] == ['Write "3600s".']
    assert (reading.message.timeout, reading.message.max_wait_duration) == (
        timedelta(hours=1),
        timedelta(minutes=1),
    )


def test_a_long_unknown_key_is_cut() -> None:
    for case in ("snake", "camel"):
        reading = read(CustomJobSpec, {"x" * 3_000_000: 1, "a\nb": 2}, case=case)  # type: ignore[arg-type]
        assert [len(each.path) < 200 and len(each.reason) < 300 for each in reading.findings] == [True, True]
        assert not [each for each in reading.findings if "\n" in each.told()]


def test_an_unknown_field_of_a_tuning_job_is_told_where_it_belongs() -> None:
    (finding,) = read(HyperparameterTuningJob, {"machineType": "x"}, case="camel").findings
    assert finding.fix.startswith("It is a field of MachineSpec: trialJobSpec.workerPoolSpecs[].machineSpec")
    (finding,) = read(HyperparameterTuningJob, {"zzz": 1}, case="camel").findings
    assert finding.fix.startswith("It has displayName, studySpec")
