"""The typed messages against the real protos of google.cloud.aiplatform_v1."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies

from penstock_components.jobs import messages as custom_job
from penstock_components.jobs import study
from penstock_components.jobs.messages import CustomJob, CustomJobSpec, Message
from penstock_components.jobs.reader import read
from penstock_components.jobs.schema import Field, fields_of
from penstock_components.jobs.study import HyperparameterTuningJob
from penstock_components.jobs.wire import case_of, from_api, to_api
from unit.penstock_components.jobs.protos import messages, proto_of

KINDS = [
    kind
    for module in (custom_job, study)
    for kind in vars(module).values()
    if isinstance(kind, type)
    and issubclass(kind, Message)
    and kind is not Message
    and kind.__module__ == module.__name__
]
SLOW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def wire_type(field: Field) -> tuple[Any, ...]:
    return (
        "map" if field.is_map else field.type.__name__,
        field.is_repeated,
        bool(field.values),
        field.is_int64,
    )


def proto_type(field: Any) -> tuple[Any, ...]:
    names = {
        "StringValue": "str", "BoolValue": "bool", "Int32Value": "int", "Duration": "timedelta", "Timestamp": "str",
        "LabelsEntry": "map",
    }  # fmt: skip
    kinds = {1: "float", 2: "float", 3: "int", 5: "int", 8: "bool", 9: "str", 14: "str"}
    if field.message is not None:
        kind = names.get(field.message.__name__, field.message.__name__)
    else:
        kind = kinds[int(field.proto_type)]
    return (kind, bool(field.repeated) and kind != "map", field.enum is not None, int(field.proto_type) == 3)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_has_the_fields_of_the_proto_and_no_other(kind: type[Message]) -> None:
    proto = proto_of(kind).meta.fields
    ours = {field.name: wire_type(field) for field in fields_of(kind)}
    assert ours == {name: proto_type(field) for name, field in proto.items() if name not in kind.OUTPUT_ONLY}
    assert set(kind.OUTPUT_ONLY) <= set(proto)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_enumeration_has_the_names_and_numbers_of_the_proto(kind: type[Message]) -> None:
    for field in fields_of(kind):
        if field.values:
            enum = proto_of(kind).meta.fields[field.name].enum
            assert dict(field.values) == {each.name: each.value for each in enum}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_excludes_each_other_is_a_oneof_of_the_proto(kind: type[Message]) -> None:
    fields = proto_of(kind).meta.fields
    assert set(kind.ONE_OF) == {name for name, field in fields.items() if field.oneof and not field.optional}


@pytest.mark.parametrize("kind", [CustomJob, CustomJobSpec, HyperparameterTuningJob])
@SLOW
@given(data=strategies.data())
def test_a_message_goes_through_the_real_proto_in_both_cases_without_loss(
    kind: type[Message], data: strategies.DataObject
) -> None:
    message = data.draw(messages(kind))
    proto = proto_of(kind)
    as_gapic = proto(to_api(message, "snake"))
    as_rest = proto.from_json(json.dumps(to_api(message, "camel")))
    assert as_gapic == as_rest
    returned = proto.to_json(
        as_rest, use_integers_for_enums=False, always_print_fields_with_no_presence=False
    )
    assert from_api(kind, json.loads(returned), "camel") == message
    numbered = proto.to_json(as_rest, use_integers_for_enums=True, always_print_fields_with_no_presence=True)
    assert from_api(kind, json.loads(numbered), "camel") == message


@pytest.mark.parametrize("case", ["snake", "camel"])
@SLOW
@given(data=strategies.data())
def test_what_is_written_is_read_again(case: Any, data: strategies.DataObject) -> None:
    message = data.draw(messages(CustomJob))
    assert from_api(CustomJob, json.loads(json.dumps(to_api(message, case))), case) == message


@pytest.mark.parametrize("kind", [CustomJob, HyperparameterTuningJob])
@SLOW
@given(data=strategies.data())
def test_what_googles_client_writes_of_a_job_that_it_has_got_has_no_finding(
    kind: type[Message], data: strategies.DataObject
) -> None:
    message = data.draw(messages(kind))
    proto = proto_of(kind)
    got = proto(to_api(message, "snake"))
    got.name, got.state = "projects/1/locations/us-central1/customJobs/2", 3
    in_snake = proto.to_json(got, preserving_proto_field_name=True, use_integers_for_enums=False)
    for returned in (proto.to_dict(got), json.loads(in_snake)):
        reading = read(kind, json.loads(json.dumps(returned)), case="snake")
        assert (reading.message, reading.findings) == (message, ())
    assert read(kind, json.loads(proto.to_json(got)), case="camel").findings == ()


POOL = {"machine_spec": {"machine_type": "n1-standard-4"}, "replica_count": 1}


@pytest.mark.parametrize(
    ("value", "case"),
    [
        ({"labels": {"fooBar": "x", "bazQux": "y"}, "job_spec": {"worker_pool_specs": []}}, "snake"),
        ({"labels": {"foo_bar": "x", "baz_qux": "y"}, "jobSpec": {"workerPoolSpecs": []}}, "camel"),
        ({"someKey": 1, "otherKey": 2, "thirdKey": {"displayName": 1}, "worker_pool_specs": [POOL]}, "snake"),
        ({"create_time": "x", "job_spec": {"worker_pool_specs": [POOL, {"replicaCount": 1}]}}, "snake"),
        (
            {"jobSpec": {"workerPoolSpecs": [{"machine_type": 1, "accelerator_type": 2, "image_uri": 3}]}},
            "camel",
        ),
        ({"trialJobSpec": {}, "study_spec_metrics": {}}, "camel"),
        ({"jobSpec": {"worker_pool_specs": []}}, "camel"),
        ({"network": "n"}, "snake"),
        ([], "snake"),
        (None, "snake"),
    ],
)
def test_the_case_is_that_of_the_fields_not_of_an_authors_own_names(value: Any, case: str) -> None:
    assert case_of(value) == case


def test_the_case_of_any_message_can_be_told() -> None:
    assert from_api(study.DoubleValueSpec, {"minValue": 1}) == study.DoubleValueSpec(min_value=1.0)
    assert from_api(study.DoubleValueSpec, {"min_value": 1}) == study.DoubleValueSpec(min_value=1.0)


def test_keys_of_labels_do_not_turn_a_good_file_into_a_bad_one() -> None:
    labels = {"fooBar": "x"}
    assert from_api(CustomJob, {"labels": labels, "display_name": "d"}) == CustomJob(
        display_name="d", labels=labels
    )
