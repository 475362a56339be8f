import itertools

import pytest
from google.cloud.aiplatform_v1.types import PipelineTaskDetail

from penstock_local.orchestrator.state import MOVES, TaskLife, TaskState


def test_values_are_those_of_the_vertex_api() -> None:
    theirs = {state.name: int(state) for state in PipelineTaskDetail.State if state}
    del theirs["CANCEL_PENDING"]
    assert {state.name: int(state) for state in TaskState} == theirs


@pytest.mark.parametrize(("old", "new"), list(itertools.product(TaskState, TaskState)))
def test_only_moves_of_the_table_are_possible(old: TaskState, new: TaskState) -> None:
    life = TaskLife()
    life.state = old
    if new in MOVES[old]:
        life.move(new)
        assert life.state is new
    else:
        with pytest.raises(ValueError, match=f"{old.name} task cannot become {new.name}"):
            life.move(new)


def test_nothing_leaves_a_final_state() -> None:
    final = {"SUCCEEDED", "CANCELLED", "FAILED", "SKIPPED", "NOT_TRIGGERED"}
    assert {state.name for state in TaskState if state.is_final} == final


def test_a_cancelled_task_cannot_succeed_any_more() -> None:
    assert MOVES[TaskState.CANCELLING] == {TaskState.CANCELLED}
