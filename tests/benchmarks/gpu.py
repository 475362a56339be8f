"""Throughput on one GPU: ours, a plain compiled loop and HF Trainer, in bf16, beside the matmul rate of the same run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness import Arm, Costs, StepDone, interleave
from benchmarks.random_dataset import build_dataset
from benchmarks.rows import Machine, Row, Samples, compare
from benchmarks.train_arms import OUR_DECODER, Setting, bare, hf_trainer, ours
from penstock_components.machines.catalogue import peak_tflops
from penstock_trainer.contract.config import ModelConfig
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.observe.flops import flops_per_token
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.world import World

PEAK_TFLOPS = peak_tflops("NVIDIA_H200_141GB", "bf16")
_VOCAB_SIZE = 50304
_STEPS_PER_TURN = 10
"""A turn ends with a wait for the device, which a loop alone would not have; over ten steps it does not count."""
_TURNS = 20
_WARMUP = 20
_MATMUL = 8192
_MATMULS = 20
"""Products of a step of the matmul arm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A model and its batch."""

    name: str
    model: ModelConfig
    seq_len: int
    batch: int


SIZES = (
    Size(
        name="124M",
        model=ModelConfig(dim=768, num_layers=12, num_heads=12, num_kv_heads=12, ffn_dim=2048),
        seq_len=1024,
        batch=32,
    ),
    Size(
        name="1B",
        model=ModelConfig(dim=2048, num_layers=16, num_heads=32, num_kv_heads=8, ffn_dim=8192),
        seq_len=2048,
        batch=8,
    ),
)


def gpu_rows(size: Size, machine: Machine, directory: Path) -> list[Row]:
    """One size. Raises the error of our own arm; a peer that fails is a row that is not ok."""
    steps = _STEPS_PER_TURN * (_TURNS + 1) + _WARMUP
    directory = directory / size.name
    setting = Setting(
        model=size.model,
        vocab_size=_VOCAB_SIZE,
        seq_len=size.seq_len,
        batch=size.batch,
        steps=steps,
        log_interval=_STEPS_PER_TURN,
        data_uri=build_dataset(
            directory, vocab_size=_VOCAB_SIZE, num_tokens=steps * size.batch * size.seq_len + 1
        ),
        directory=directory,
        device=torch.device("cuda", 0),
        precision="bf16",
        compile=True,
    )
    with World.join(RankEnv(), timeout_seconds=600) as world:
        own = ours(setting, world, "ddp")
        peers = [bare(setting), hf_trainer(setting, OUR_DECODER)]
        with (directory / "stdout").open("w") as file, redirect_stdout(file):
            outcome = interleave(
                [own, *peers, _matmul(steps)],
                steps=steps,
                warmup=_WARMUP,
                steps_per_turn=_STEPS_PER_TURN,
                clock=_device_clock,
            )
    if own.name in outcome.errors:
        raise outcome.errors[own.name]
    return _rows(size, setting, own.name, [arm.name for arm in peers], outcome.costs, machine)


def _rows(
    size: Size, setting: Setting, own: str, peers: list[str], costs: Mapping[str, Costs], machine: Machine
) -> list[Row]:
    throughput = {name: setting.tokens_per_step / cost.step_seconds for name, cost in costs.items()}
    flops = flops_per_token(Decoder(size.model, _VOCAB_SIZE), size.seq_len)
    assert flops is not None, "known for the built-in decoder"
    tflops = throughput[own] * flops / 1e12
    matmul = costs.get("matmul")
    rows = [
        compare(
            f"throughput, {size.name} bf16 compiled",
            throughput[own],
            throughput.get(peer),
            peer_name=peer,
            unit="tokens/s",
            target=">= 1.0",
            machine=machine,
        )
        for peer in peers
    ]
    yardsticks: list[tuple[str, Samples | None]] = [
        (f"peak of {PEAK_TFLOPS:g} (ratio: MFU)", 0 * tflops + PEAK_TFLOPS),
        ("matmul rate of this run", 2e-12 * _MATMUL**3 * _MATMULS / matmul.step_seconds if matmul else None),
    ]
    return rows + [
        compare(f"rate, {size.name} bf16", tflops, peer, peer_name=name, unit="TFLOP/s", machine=machine)
        for name, peer in yardsticks
    ]


def _matmul(steps: int) -> Arm:
    """What the device does at best: square products of bf16."""

    def fit(step_done: StepDone) -> None:
        left, right = (torch.randn(_MATMUL, _MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        product = torch.empty_like(left)
        for _ in range(steps):
            step_done()
            for _ in range(_MATMULS):
                torch.mm(left, right, out=product)

    return Arm("matmul", fit)


def _device_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()
