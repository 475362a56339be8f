"""What is said when memory runs out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from penstock_trainer.contract.config import EngineConfig, JobConfig
from penstock_trainer.observe.memory import MemoryUse, explain, measure, ran_out_of_memory

GIB = 2**30


def use(**more: Any) -> MemoryUse:
    fields = {
        "weights": 2 * GIB,
        "gradients": 2 * GIB,
        "optimizer": 4 * GIB,
        "peak": 78 * GIB,
        "capacity": 80 * GIB,
        "ranks": 8,
    }
    return MemoryUse(**{**fields, **more})


def config(**engine: Any) -> JobConfig:
    return JobConfig(engine=EngineConfig(**engine))


def test_it_says_what_held_the_memory() -> None:
    told = explain(use(), config())
    assert "Of 78.00 GiB at most in use (80.00 GiB are there)" in told
    assert "weights 2.00 GiB, gradients 2.00 GiB, optimizer state 4.00 GiB" in told
    assert "activations above all, 70.00 GiB" in told


def test_activations_are_answered_by_what_saves_activations() -> None:
    told = explain(use(), config(strategy="ddp"))
    names = [
        "max_micro_batch 4 (now 8",
        "activation_checkpointing full",
        "loss_chunk_tokens",
        "precision bf16",
    ]
    places = [told.index(name) for name in (*names, "strategy fsdp-full")]
    assert places == sorted(places)


def test_state_is_answered_by_sharding_it() -> None:
    told = explain(use(optimizer=60 * GIB), config(strategy="zero1"))
    assert told.index("engine.strategy zero3 (now zero1") < told.index("engine.cpu_offload true")
    assert told.index("engine.cpu_offload true") < told.index("max_micro_batch")


def test_one_rank_is_not_told_to_share() -> None:
    assert "engine.strategy fsdp-full (" not in explain(use(ranks=1), config(strategy="ddp"))


def test_a_setting_that_is_on_is_not_advised() -> None:
    everything = config(
        strategy="fsdp-full",
        activation_checkpointing="full",
        loss_chunk_tokens=4096,
        precision="bf16",
        cpu_offload=True,
    )
    told = explain(use(), replace(everything, max_micro_batch=1))
    assert "Every setting that saves memory is on" in told
    assert "most effective" not in told


def test_before_the_first_step_only_what_holds_state_is_to_blame() -> None:
    told = explain(None, config(strategy="ddp"))
    assert "before the first step" in told
    assert "fsdp-full" in told
    assert "max_micro_batch" not in told


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: ..."),
    ],
)
def test_every_spelling_of_no_memory_is_known(error: Exception) -> None:
    assert ran_out_of_memory(error)
    following = RuntimeError("a step failed")
    following.__cause__ = error
    assert ran_out_of_memory(following)


def test_torchs_own_words_are_still_those() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**50)
    assert ran_out_of_memory(failed.value)


def test_other_errors_are_not_taken_for_it() -> None:
    assert not ran_out_of_memory(RuntimeError("Connection reset by peer"))


def test_bytes_are_counted_where_they_are_held() -> None:
    model = nn.Linear(10, 100, bias=False)  # 4000 bytes
    weight = model.weight.detach()
    moments = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
    state = {"model": {"weight": weight}, "opt": {"state": {"weight": moments}}}
    told = measure(model, state, config(strategy="ddp"), device=torch.device("cpu"), ranks=2)
    assert (told.weights, told.gradients, told.optimizer) == (4000, 4000, 8000)
    assert 2**26 < told.peak < told.capacity
    assert told.activations == told.peak - 16000
