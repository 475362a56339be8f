from typing import Any

import pytest

from penstock_local.orchestrator.conditions import parse_condition
from penstock_local.orchestrator.errors import ConditionError

VALUES: dict[str, Any] = {
    "pipelinechannel--num-Output": 7,
    "lr": 0.5,
    "s": "it's",
    "flag": True,
    "text": "12",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int(inputs.parameter_values['pipelinechannel--num-Output']) == 7", True),
        ("!(int(inputs.parameter_values['pipelinechannel--num-Output']) == 7)", False),
        ("inputs.parameter_values['lr'] > double(1)", False),
        ("inputs.parameter_values['lr'] <= 0.5", True),
        (r"inputs.parameter_values['s'] == 'it\'s'", True),
        ('inputs.parameter_values["s"] != "its"', True),
        ("inputs.parameter_values['flag'] == true", True),
        ("inputs.parameter_values['flag']", True),
        ("int(inputs.parameter_values['text']) >= -1", True),
        ("string(inputs.parameter_values['pipelinechannel--num-Output']) == '7'", True),
        ("string(true) == 'true'", True),
        ("'a' < 'b'", True),
        ("true || false && false", True),
        ("(true || false) && false", False),
        ("1 < 2 == true", True),
        ("!false && !(1 > 2)", True),
        ("false && inputs.parameter_values['absent'] == 1", False),
        ("1e3 == 1000", True),
        ("null == null", True),
    ],
)
def test_conditions_evaluate_as_cel(text: str, expected: bool) -> None:
    assert parse_condition(text).is_true(VALUES) is expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inputs.parameter_values['s'] == 1", 'cannot compare "it\'s" (str) == 1 (int)'),
        ("inputs.parameter_values['flag'] > 0", "cannot compare True (bool) > 0 (int)"),
        ("inputs.parameter_values['lr']", "stands where true or false is expected"),
        ("inputs.parameter_values['absent'] == 1", "'absent' has no value"),
        ("int('x') == 1", "int('x')"),
        ("int(inputs.parameter_values['flag']) == 1", "not True"),
        ("null < null", "no order"),
    ],
)
def test_type_errors_are_errors_and_not_false(text: str, message: str) -> None:
    with pytest.raises(ConditionError, match="condition") as error:
        parse_condition(text).is_true(VALUES)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "1 ==",
        "(1 == 1",
        "1 == 1)",
        "1 = 1",
        "inputs.parameters['x'] == 1",
        "inputs.parameter_values[x] == 1",
        "__import__('os').system('true')",
        "'open == 1",
        # What the compiler writes for `If(number == 'text')`.
        "'int(inputs.parameter_values['n'])' == 'a'",
    ],
)
def test_what_is_not_a_condition_is_refused(text: str) -> None:
    with pytest.raises(ConditionError):
        parse_condition(text)
