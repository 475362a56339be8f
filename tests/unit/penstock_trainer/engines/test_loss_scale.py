"""The loss scale of fp16."""

from __future__ import annotations

from penstock_trainer.engines.loss_scale import GROWTH_INTERVAL, INITIAL_SCALE, LossScale


def test_an_overflow_halves_and_a_long_run_without_one_doubles() -> None:
    scale = LossScale()
    scale.update(overflowed=True)
    assert scale.value == INITIAL_SCALE / 2
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(overflowed=False)
    assert scale.value == INITIAL_SCALE / 2
    scale.update(overflowed=False)
    assert scale.value == INITIAL_SCALE


def test_an_overflow_begins_the_count_anew() -> None:
    scale = LossScale()
    for _ in range(GROWTH_INTERVAL - 1):
        scale.update(overflowed=False)
    scale.update(overflowed=True)
    scale.update(overflowed=False)
    assert scale.value == INITIAL_SCALE / 2


def test_a_loaded_scale_goes_on_where_it_was() -> None:
    scale, other = LossScale(), LossScale()
    for _ in range(5):
        scale.update(overflowed=True)
    for name, tensor in other.state().items():
        tensor.copy_(scale.state()[name])
    assert other.value == INITIAL_SCALE / 32
