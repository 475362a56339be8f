"""Batches that are prepared ahead."""

from __future__ import annotations

import threading

import pytest
import torch

from penstock_trainer.data.samples import LocalStep
from penstock_trainer.loader import Loader

CPU = torch.device("cpu")


def step_of(first: int) -> LocalStep:
    return LocalStep([{"input_ids": torch.tensor([first])}], num_targets=1)


def firsts(loader: Loader, steps: list[int]) -> list[int]:
    return [int(loader.step(first).batches[0]["input_ids"]) for first in steps]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_steps_come_in_order_whatever_is_prepared_ahead(ahead: int) -> None:
    with Loader(step_of, stride=4, ahead=ahead, device=CPU) as loader:
        assert firsts(loader, [0, 4, 8, 12, 16]) == [0, 4, 8, 12, 16]


def test_a_step_elsewhere_is_prepared_anew() -> None:
    with Loader(step_of, stride=4, ahead=2, device=CPU) as loader:
        assert firsts(loader, [0, 4, 100, 104, 0]) == [0, 4, 100, 104, 0]


def test_the_steps_to_come_are_prepared_while_one_computes() -> None:
    prepared = threading.Semaphore(0)

    def load(first: int) -> LocalStep:
        prepared.release()
        return step_of(first)

    with Loader(load, stride=4, ahead=2, device=CPU) as loader:
        loader.step(0)
        assert all(prepared.acquire(timeout=5.0) for _ in range(3)), "this step and the two after it"


def test_an_error_is_raised_by_the_step_that_it_belongs_to() -> None:
    def load(first: int) -> LocalStep:
        if first == 4:
            raise ValueError("shard gone")
        return step_of(first)

    with Loader(load, stride=4, ahead=2, device=CPU) as loader:
        assert firsts(loader, [0]) == [0]
        with pytest.raises(ValueError, match="shard gone"):
            loader.step(4)
