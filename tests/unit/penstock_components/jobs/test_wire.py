"""The typed messages against the real protos of google.cloud.aiplatform_v1."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies

from penstock_components.jobs import messages as custom_job
from penstock_components.jobs import study
from penstock_components.jobs.messages import CustomJob, CustomJobSpec, Message
from penstock_components.jobs.schema import Field, fields_of
from penstock_components.jobs.study import HyperparameterTuningJob
from penstock_components.jobs.wire import from_api, to_api
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
