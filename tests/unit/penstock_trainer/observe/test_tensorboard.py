"""Event files as TensorBoard reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock_trainer.contract.events import EvaluationEvent, StepEvent
from penstock_trainer.observe.tensorboard import TensorBoard
from penstock_trainer.storage import StorageError


def step(number: int, loss: float | None = 1.0) -> StepEvent:
    return StepEvent(
        step=number, steps=9, loss=loss, learning_rate=0.1, grad_norm=1.0, tokens_per_second=10.0, mfu=0.5
    )


def shown(directory: Path, tag: str) -> dict[int, float]:
    read = EventAccumulator(str(directory))
    read.Reload()
    return {event.step: event.value for event in read.Scalars(tag)}


def test_every_upload_is_a_file_and_they_are_read_as_one_curve(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path.as_uri())
    for number in range(6):
        board.step(step(number, loss=float(number)))
        if number % 2:
            board.upload()
    board.upload()  # nothing is left: no file
    assert len(list(tmp_path.iterdir())) == 3
    assert shown(tmp_path, "train/loss") == {number: float(number) for number in range(6)}
    assert shown(tmp_path, "train/mfu")[5] == 0.5


def test_a_path_is_a_directory_too(tmp_path: Path) -> None:
    board = TensorBoard(str(tmp_path))
    board.step(step(1))
    board.close()
    assert shown(tmp_path, "train/loss") == {1: 1.0}


def test_steps_that_come_again_replace_those_before(tmp_path: Path) -> None:
    for attempt in (1.0, 2.0):  # the second continues from step 2
        board = TensorBoard(tmp_path.as_uri())
        for number in range(1 if attempt == 1 else 3, 6):
            board.step(step(number, loss=attempt))
        board.close()
    rolled_back = TensorBoard(tmp_path.as_uri())
    for number in (6, 7, 6):
        rolled_back.step(step(number, loss=3.0))
    rolled_back.close()
    curve = {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0, 5: 2.0, 6: 3.0}
    assert shown(tmp_path, "train/loss") == curve


def test_what_is_not_known_is_no_point(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path.as_uri())
    board.step(step(1))
    board.step(step(2, loss=None))
    board.evaluation(EvaluationEvent(step=2, loss=3.0, accuracy=0.25, targets=8, best=True, seconds=1.0))
    board.close()
    assert shown(tmp_path, "train/loss") == {1: 1.0}
    assert shown(tmp_path, "evaluation/accuracy") == {2: 0.25}


def test_what_could_not_be_uploaded_comes_with_the_next_upload(tmp_path: Path) -> None:
    directory = tmp_path / "runs"
    directory.write_text("in the way")
    board = TensorBoard(directory.as_uri())
    board.step(step(1))
    with pytest.raises(StorageError):
        board.upload()
    directory.unlink()
    board.upload()
    assert shown(directory, "train/loss") == {1: 1.0}
