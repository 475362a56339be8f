"""Batches that are prepared ahead."""

from __future__ import annotations

import threading

import pytest
import torch

from penstock_trainer.loader import Loader
from penstock_trainer.model.objective import Batch

CPU = torch.device("cpu")


def batch_of(first: int) -> list[Batch]:
    return [{"input_ids": torch.tensor([first])}]


def firsts(loader: Loader, steps: list[int]) -> list[int]:
    return [int(loader.step(first)[0]["input_ids"]) for first in steps]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_steps_come_in_order_whatever_is_prepared_ahead(ahead: int) -> None:
    with Loader(batch_of, stride=4, ahead=ahead, device=CPU) as loader:
        assert firsts(loader, [0, 4, 8, 12, 16]) == [0, 4, 8, 12, 16]


def test_a_step_elsewhere_is_prepared_anew() -> None:
    with Loader(batch_of, stride=4, ahead=2, device=CPU) as loader:
        assert firsts(loader, [0, 4, 100, 104, 0]) == [0, 4, 100, 104, 0]


def test_the_steps_to_come_are_prepared_while_one_computes() -> None:
    prepared = threading.Semaphore(0)

    def load(first: int) -> list[Batch]:
        prepared.release()
        return batch_of(first)

    with Loader(load, stride=4, ahead=2, device=CPU) as loader:
        loader.step(0)
        assert all(prepared.acquire(timeout=5.0) for _ in range(3)), "this step and the two after it"


def test_an_error_is_raised_by_the_step_that_it_belongs_to() -> None:
    def load(first: int) -> list[Batch]:
        if first == 4:
            raise ValueError("shard gone")
        return batch_of(first)

    with Loader(load, stride=4, ahead=2, device=CPU) as loader:
        assert firsts(loader, [0]) == [0]
        with pytest.raises(ValueError, match="shard gone"):
            loader.step(4)
