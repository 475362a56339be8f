import json
from typing import Any

import pytest

from penstock_local.orchestrator.artifact import Artifact
from penstock_local.orchestrator.errors import PlaceholderError
from penstock_local.orchestrator.placeholders import Scope

PARAMETERS: dict[str, Any] = {
    "text": 'say "hi"',
    "number": 3,
    "rate": 0.5,
    "flag": True,
    "items": [1, {"a": "b"}],
    "absent": None,
    "hostile": "{{$.pipeline_root}}",
    "empty": "",
}
MODEL = Artifact(
    name="projects/1/locations/l/metadataStores/default/artifacts/9",
    uri="gs://bkt/model",
    schema_title="system.Model",
    schema_version="0.0.1",
    metadata={"resourceName": "models/7", "size": 12, "tags": ["x"]},
)
EXECUTOR_INPUT = {"inputs": {"parameterValues": {"text": 'say "hi"'}}}
SCOPE = Scope(
    constants={"pipeline_root": "gs://bkt/runs", "pipeline_job_name": "demo-1"},
    parameter=PARAMETERS.__getitem__,
    artifacts={"model": (MODEL,), "several": (MODEL, MODEL), "none": None},
    outputs={
        "parameters": {"out": {"outputFile": "/task/out"}},
        "artifacts": {"data": {"artifacts": [{"uri": "gs://bkt/data", "name": "n", "metadata": {"k": "v"}}]}},
        "outputFile": "/task/executor_output.json",
    },
    executor_input=EXECUTOR_INPUT,
    local_path=lambda uri: uri.replace("gs://", "/gcs/"),
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain $ {{ braces }}", "plain $ {{ braces }}"),
        ("{{$.pipeline_root}}/{{$.pipeline_job_name}}/train", "gs://bkt/runs/demo-1/train"),
        ("{{$.inputs.parameters['text']}}", 'say "hi"'),
        ('{{$.inputs.parameters["text"]}}', 'say "hi"'),
        ("n={{$.inputs.parameters['number']}}", "n=3"),
        ("{{$.inputs.parameters['rate']}}", "0.5"),
        ("{{$.inputs.parameters['flag']}}", "true"),
        ("{{$.inputs.parameters['items']}}", '[1, {"a": "b"}]'),
        ("{{$.inputs.parameters['absent']}}", "null"),
        ("{{$.inputs.parameters['empty']}}", ""),
        ("{{$.inputs.parameters['hostile']}}", "{{$.pipeline_root}}"),
        ("{{$.inputs.artifacts['model'].uri}}", "gs://bkt/model"),
        ("{{$.inputs.artifacts['model'].path}}", "/gcs/bkt/model"),
        ("{{$.inputs.artifacts['model'].name}}", MODEL.name),
        ("{{$.inputs.artifacts['model'].metadata['resourceName']}}", "models/7"),
        ("{{$.inputs.artifacts['model'].metadata['size']}}", "12"),
        ("{{$.inputs.artifacts['model'].metadata}}", json.dumps(MODEL.metadata)),
        ("{{$.inputs.artifacts['several']}}", json.dumps([MODEL.to_runtime_json()] * 2)),
        ("{{$.inputs.artifacts['none'].uri}}", "null"),
        ("{{$.outputs.parameters['out'].output_file}}", "/task/out"),
        ("{{$.outputs.artifacts['data'].uri}}", "gs://bkt/data"),
        ("{{$.outputs.artifacts['data'].path}}", "/gcs/bkt/data"),
        ("{{$.outputs.artifacts['data'].metadata['k']}}", "v"),
        ("{{$.outputs.output_file}}", "/task/executor_output.json"),
        ("{{$}}", json.dumps(EXECUTOR_INPUT)),
        ('"{{$.json_escape[1]}}"', json.dumps(json.dumps(EXECUTOR_INPUT))),
    ],
)
def test_placeholders_resolve_to_text(text: str, expected: str) -> None:
    assert SCOPE.resolve(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{$.pipeline_typo}}", "{{$.pipeline_typo}} has no value here; known are pipeline_job_name"),
        ("{{$.inputs.artifacts['typo'].uri}}", "{{$.inputs.artifacts['typo'].uri}} has no value"),
        ("{{$.inputs.artifacts['model'].size}}", "{{$.inputs.artifacts['model'].size}} has no value"),
        ("{{$.inputs.artifacts['model'].metadata['typo']}}", "it has: resourceName, size, tags"),
        ("{{$.outputs.parameters['typo'].output_file}}", "has no value"),
        ("{{$.inputs.parameters['a}}", "cannot read"),
        ("{{$.workspace_path}}", "{{$.workspace_path}} has no value"),
        ("{{$.inputs.artifacts['model'].value}}", "cannot read gs://bkt/model"),
    ],
)
def test_unknown_placeholders_are_named(text: str, message: str) -> None:
    with pytest.raises(PlaceholderError) as error:
        SCOPE.resolve(text)
    assert message in str(error.value)


def test_value_is_the_artifacts_content() -> None:
    scope = Scope(
        constants={},
        artifacts={"model": (MODEL,)},
        read_object=lambda uri: f"content of {uri}".encode(),
    )
    assert scope.resolve("{{$.inputs.artifacts['model'].value}}") == "content of gs://bkt/model"


def test_an_artifact_has_a_path_in_a_container_alone() -> None:
    scope = Scope(constants={}, artifacts={"model": (MODEL,)})
    with pytest.raises(PlaceholderError, match="gs://bkt/model has a path only in"):
        scope.resolve("{{$.inputs.artifacts['model'].path}}")


def test_structures_are_resolved_at_any_depth_and_keep_their_types() -> None:
    value = [{"args": ["--x={{$.inputs.parameters['number']}}"], "count": 1, "on": False, "none": None}]
    assert SCOPE.resolve(value) == [{"args": ["--x=3"], "count": 1, "on": False, "none": None}]


@pytest.mark.parametrize(
    ("element", "expected"),
    [
        ('{"Concat": ["--n=", "{{$.inputs.parameters[\'number\']}}"]}', ("--n=3",)),
        (
            '{"IfPresent": {"InputName": "text", "Then": ["--t", "{{$.inputs.parameters[\'text\']}}"]}}',
            ("--t", 'say "hi"'),
        ),
        ('{"IfPresent": {"InputName": "absent", "Then": "yes"}}', ()),
        ('{"IfPresent": {"InputName": "absent", "Then": "yes", "Else": ["no", "thing"]}}', ("no", "thing")),
        ('{"IfPresent": {"InputName": "none", "Then": "yes", "Else": "no"}}', ("no",)),
        (
            '{"IfPresent": {"InputName": "model", "Then": "{{$.inputs.artifacts[\'model\'].uri}}"}}',
            ("gs://bkt/model",),
        ),
        (
            '{"Concat": ["a", {"IfPresent": {"InputName": "absent", "Then": "b"}}, {"Concat": ["c", "d"]}]}',
            ("acd",),
        ),
        ('{"Concat": "is data"}x', None),
        ('{"Other": ["kept"]}', ('{"Other": ["kept"]}',)),
    ],
)
def test_command_lines_know_concat_and_if_present(element: str, expected: tuple[str, ...] | None) -> None:
    if expected is None:
        with pytest.raises(PlaceholderError, match="cannot read"):
            SCOPE.resolve_command([element])
    else:
        assert SCOPE.resolve_command([element]) == expected


def test_the_executor_input_inside_a_struct_survives_the_json_around_it() -> None:
    scope = Scope(
        constants={},
        parameter=PARAMETERS.__getitem__,
        templates={"items": [{"args": ["{{$.json_escape[1]}}", "{{$.inputs.parameters['hostile']}}"]}]},
        executor_input=EXECUTOR_INPUT,
    )
    payload = json.loads(scope.resolve("{\"pools\": {{$.inputs.parameters['items']}}}"))
    [pool] = payload["pools"]
    assert json.loads(pool["args"][0]) == EXECUTOR_INPUT
    assert pool["args"][1] == PARAMETERS["hostile"]


def test_an_unescaped_executor_input_inside_a_struct_is_refused() -> None:
    scope = Scope(constants={}, templates={"items": ["{{$}}"]}, executor_input=EXECUTOR_INPUT)
    with pytest.raises(PlaceholderError, match="json_escape"):
        scope.resolve("{{$.inputs.parameters['items']}}")
