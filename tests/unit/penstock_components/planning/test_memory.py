"""Memory: what the counted ranks of tests/distributed/test_planner.py cannot show, at sizes that no test can run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from penstock_components.planning.memory import RankMemory, rank_memory
from penstock_components.planning.shape import ModelShape, decoder_shape
from penstock_trainer.contract.config import DataConfig, EngineConfig, JobConfig, ModelConfig
from penstock_trainer.contract.fields import ContractError

# The shape of Llama 3.1 8B.
LARGE = decoder_shape(
    ModelConfig(dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336, tie_embeddings=False),
    128_256,
)
GIB = 2**30


def job(*, batch: int = 64, micro: int = 1, length: int = 8192, **engine: Any) -> JobConfig:
    return JobConfig(
        model=LARGE.decoder or ModelConfig(),
        data=DataConfig(uri="gs://none", seq_len=length),
        engine=EngineConfig(**{"precision": "bf16", "loss_chunk_tokens": 1024, **engine}),
        global_batch=batch,
        max_micro_batch=micro,
    )


def of(config: JobConfig, shape: ModelShape = LARGE, *, ranks: int = 64, per_node: int = 8) -> RankMemory:
    return rank_memory(config, shape, world_size=ranks, ranks_per_node=per_node)


@pytest.mark.parametrize(
    ("strategy", "bytes_per_parameter"),
    [
        # fp32 weights, gradients and two moments.
        ("ddp", 16),
        # 2 of parameters, and of masters, gradients and moments a 64th of 16 (ZeRO, figure 1, with K = 12 and fp32
        # gradients); stage 1 in bf16 keeps the fp32 gradients of all.
        ("zero1", 2 + 4 + 12 / 64),
        ("zero2", 2 + 16 / 64),
        ("zero3", 18 / 64),
        # fp32 shards are the masters.
        ("fsdp-full", 16 / 64),
        ("fsdp-hybrid", 16 / 8),
    ],
)
def test_states_of_a_large_model_are_the_papers_up_to_padding_and_small_parameters(
    strategy: str, bytes_per_parameter: float
) -> None:
    held = of(job(strategy=strategy)).states.device
    # Norms stay whole in stage 3, and its bucket is none of the paper's.
    expected = bytes_per_parameter * LARGE.num_parameters
    assert held.total - held.buffers == pytest.approx(expected, rel=2e-3)


def test_offloading_moves_all_but_the_parameters_to_the_host() -> None:
    config = job(strategy="zero2", cpu_offload=True)
    offloaded, kept = of(config), of(job(strategy="zero2"))
    assert offloaded.states.device.masters == offloaded.states.device.optimizer == 0
    assert offloaded.states.host.optimizer == kept.states.device.optimizer
    assert offloaded.device < kept.device
    assert of(job(strategy="fsdp-full", cpu_offload=True)).states.device.total == 0


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp-hybrid"])
def test_a_save_takes_each_rank_a_share_of_12_bytes_a_parameter_on_the_host(strategy: str) -> None:
    # fp32 weights and two moments; what several ranks hold is shared out among them.
    memory = of(job(strategy=strategy))
    assert memory.save_buffer == pytest.approx(12 * LARGE.num_parameters / 64, rel=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp-full"])
def test_accumulation_costs_the_gradients_of_the_whole_model(strategy: str) -> None:
    once, twice = (of(job(strategy=strategy, batch=batch)) for batch in (64, 128))
    assert (once.accumulation, twice.accumulation) == (1, 2)
    assert twice.device - once.device == pytest.approx(4 * LARGE.num_parameters, rel=0.15)


def test_zero_2_accumulates_in_the_ranges_that_it_has() -> None:
    once, twice = (of(job(strategy="zero2", batch=batch)) for batch in (64, 128))
    assert twice.device - once.device < 0.3 * LARGE.num_parameters


def test_checkpointing_keeps_a_layers_input_and_recomputes_one_layer() -> None:
    none, selective, full = (
        of(job(strategy="zero3", activation_checkpointing=mode)).peak
        for mode in ("none", "selective", "full")
    )
    assert none is not None
    assert selective is not None
    assert full is not None
    inputs = 32 * 8192 * 4096 * 2
    assert full.activations < inputs + none.activations / 32 * 1.7
    assert full.activations < selective.activations < none.activations


def test_a_chunked_loss_does_without_the_logits_of_the_whole_batch() -> None:
    whole, chunked = (of(job(strategy="zero3", loss_chunk_tokens=chunk)) for chunk in (0, 1024))
    # bf16 logits, and in fp32 the log-softmax and two gradients; the chunks' are an eighth, with the head's gradient.
    logits = 3 * 4 * 8192 * 128_256
    assert whole.device - chunked.device > logits / 2


def test_ranks_differ_by_padding_alone_under_fsdp() -> None:
    config = job(strategy="fsdp-full", batch=60, micro=1)
    first, last = (
        rank_memory(config, LARGE, world_size=60, ranks_per_node=8, rank=rank).states.device
        for rank in (0, 59)
    )
    assert first.parameters == last.parameters
    assert first.optimizer > last.optimizer


def test_of_a_model_that_is_not_the_decoder_the_states_are_known_and_the_peak_is_not() -> None:
    foreign = replace(LARGE, decoder=None)
    told = of(job(strategy="zero2"), foreign)
    assert told.peak is None
    assert told.device == told.states.device.total == of(job(strategy="zero2")).states.device.total


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    frozen = replace(
        LARGE, parameters=tuple(replace(one, is_trained=one.block == 31) for one in LARGE.parameters)
    )
    trained = sum(one.numel for one in frozen.trained)
    held = of(job(strategy="ddp"), frozen).states.device
    assert held.gradients == 4 * trained
    assert held.optimizer == 8 * trained + 4 * len(frozen.trained)


def test_settings_without_a_formula_are_named() -> None:
    config = job(
        strategy="zero3",
        deepspeed={"zero_optimization": {"zero_hpz_partition_size": 8, "stage3_max_reuse_distance": 0}},
    )
    assert of(config).unmodelled == ("engine.deepspeed.zero_optimization.zero_hpz_partition_size",)
    assert of(job(strategy="fsdp-full", compile=True)).unmodelled == ("engine.compile",)
    # CUDA has no fused kernel for grouped heads in fp32.
    assert of(job(strategy="fsdp-full", precision="fp32")).unmodelled == ("model.num_kv_heads",)
    assert of(job(strategy="fsdp-full")).unmodelled == ()


@pytest.mark.parametrize(
    ("ranks", "message"),
    [(48, "a multiple of the 48 ranks"), (0, "world_size")],
)
def test_a_world_that_does_not_fit_is_refused(ranks: int, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        of(job(strategy="ddp"), ranks=ranks)


def test_planning_starts_without_torch_and_fast() -> None:
    program = (
        "import sys, time, penstock_components.planning.memory, penstock_components.planning.traffic;"
        "print([name for name in ('torch', 'kfp', 'numpy') if name in sys.modules], time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    absent, _, seconds = done.stdout.strip().rpartition(" ")
    assert absent == "[]"
    assert float(seconds) < 0.3
