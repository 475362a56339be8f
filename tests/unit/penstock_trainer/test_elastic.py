"""How many nodes a job may have, and what the ends of a node's ranks under torchrun say of it."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from penstock_trainer.elastic import NodeRange, first_cause
from penstock_trainer.launch import LaunchError


def failures(*ends: tuple[int, int]) -> dict[int, ProcessFailure]:
    """Of ranks 4, 5, ... by (second of the failure, exit code)."""
    found = {}
    for local_rank, (second, exit_code) in enumerate(ends):
        failure = ProcessFailure(local_rank=local_rank, pid=1, exitcode=exit_code, error_file="")
        failure.timestamp = second
        found[4 + local_rank] = failure
    return found


@pytest.mark.parametrize(
    ("ends", "outcome", "told"),
    [
        ([(7, 3)], "failed", "rank 4 ended with exit code 3"),
        ([(7, 134)], "retryable", "rank 4 ended with exit code 134"),
        ([(7, -11)], "retryable", "rank 4 died by signal 11 (Segmentation fault)"),
        # The survivor's traceback came within the same second as the death that caused it.
        ([(7, 1), (7, -9)], "retryable", "rank 5 died by signal 9 (Killed)"),
        # The agent itself ended the other rank, at once or when it had not gone by SIGTERM.
        ([(7, 1), (7, -15)], "failed", "rank 4 ended with exit code 1"),
        ([(37, -9), (7, 1)], "failed", "rank 5 ended with exit code 1"),
    ],
)
def test_what_came_first_decides(ends: list[tuple[int, int]], outcome: str, told: str) -> None:
    assert first_cause(failures(*ends)) == (outcome, told)


@pytest.mark.parametrize("text", ["", "2", "0:2", "3:2", "1:3", "1:1", "a:2", "1:2:3", "-1:2"])
def test_a_range_that_does_not_fit_the_job_is_refused(text: str) -> None:
    with pytest.raises(
        LaunchError, match=f"--nodes={text} is not valid: it must be MIN:2 with MIN from 1 to 2"
    ):
        NodeRange.parse(text, num_nodes=2)


def test_a_range_that_fits() -> None:
    assert NodeRange.parse("1:2", num_nodes=2) == NodeRange(1, 2)
