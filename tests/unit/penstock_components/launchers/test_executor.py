"""The seam to KFP."""

from dataclasses import dataclass

import pytest

from penstock_components.launchers import executor
from penstock_components.launchers.errors import InputError
from penstock_trainer.storage import ObjectNotFoundError


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    steps: int
    rate: float
    name: str


GIVEN = {"steps": 100.0, "rate": 1, "name": "a"}


def test_parameters_take_the_types_of_the_callers_dataclass(bed):
    inputs = bed.task(GIVEN).parameters_as(Inputs)
    assert inputs == Inputs(steps=100, rate=1.0, name="a")
    assert (type(inputs.steps), type(inputs.rate)) == (int, float)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": "100"}, "steps = '100' is not valid"),
        ({"steps": 1.5}, "a whole number"),
        ({"stepz": 1}, "Did you mean 'steps'"),
        ({"name": "{{$.pipeline_root}}"}, "did not resolve this placeholder"),
    ],
)
def test_a_parameter_that_does_not_fit_is_named(bed, change, message):
    with pytest.raises(InputError, match=message.replace("{", r"\{").replace("$", r"\$")):
        bed.task({**GIVEN, **change}).parameters_as(Inputs)


def test_a_missing_parameter_is_named(bed):
    with pytest.raises(InputError, match="rate"):
        bed.task({"steps": 1, "name": "a"}).parameters_as(Inputs)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"outputs": {"outputFile": 3}}', "{{$}}"])
def test_what_is_not_an_executor_input_is_refused_with_advice(text):
    with pytest.raises(InputError, match="Pass kfp's placeholder"):
        executor.ExecutorInput.from_json(text)


def test_a_missing_artifact_is_named_beside_those_that_are_there(bed):
    task = bed.task({}, inputs={"model": "gs://b/m"}, outputs=["report"])
    assert task.input("model").uri == "gs://b/m"
    with pytest.raises(InputError, match="no input artifact 'verdict'; this task has: model"):
        task.input("verdict")
    with pytest.raises(InputError, match="no output artifact 'model'; this task has: report"):
        task.output("model")


def test_parameters_are_handed_back_in_their_files_and_in_executor_output(bed):
    task = bed.task({}, outputs=["dataset"], returns=["uri", "count", "promote"])
    executor.write_outputs(
        task,
        parameters={"uri": "gs://b/d", "count": 7, "promote": True},
        metadata={"dataset": {"tokens": 7}},
    )
    assert (bed.parameter("uri"), bed.parameter("count"), bed.parameter("promote")) == (
        "gs://b/d",
        "7",
        "true",
    )
    assert bed.metadata("dataset") == {"tokens": 7}


def test_an_artifacts_name_is_handed_back_as_it_came_and_its_uri_can_change(bed):
    task = bed.task({}, outputs=["registered"])
    executor.write_outputs(task, uris={"registered": "https://models/1"})
    (entry,) = bed.output()["artifacts"]["registered"]["artifacts"]
    assert entry == {"name": "n-registered", "uri": "https://models/1", "metadata": {}}


def test_an_expected_error_is_one_message_and_exit_code_1(bed, capsys):
    def body(task):
        raise ObjectNotFoundError("gs://b/x does not exist.")

    assert bed.run(lambda argv: executor.run(body, argv), {}) == 1
    assert capsys.readouterr().err == "ObjectNotFoundError: gs://b/x does not exist.\n"


def test_an_unexpected_error_keeps_its_traceback(bed):
    def body(task):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bed.run(lambda argv: executor.run(body, argv), {})
