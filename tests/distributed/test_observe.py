"""What runs of several ranks tell about themselves."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import step_events, tiny_config, tiny_engine
from distributed.troubled_models import HANGS_SECONDS, SECONDS
from penstock_trainer.contract.config import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    JobConfig,
    ModelConfig,
    ObserveConfig,
    OptimConfig,
)
from penstock_trainer.contract.events import StepEvent
from penstock_trainer.metrics import parse_segment
from penstock_trainer.testing import RankRun, run_ranks

PEAK_TFLOPS = 0.05
TIMEOUT_SECONDS = 120.0
COLLECTIVE_SECONDS = 3
assert HANGS_SECONDS > COLLECTIVE_SECONDS + 2, "the others have to be gone when the late rank comes"


def of_troubled(root_uri: str, *, model: str = "classifier", data: str = "samples") -> JobConfig:
    """6 steps of 4 samples without accumulation, one line for steps 2 to 6."""
    module = "distributed.troubled_models"
    return JobConfig(
        model=ModelConfig(source=f"{module}:{model}"),
        data=DataConfig(source=f"{module}:{data}", prefetch_steps=0),
        optim=OptimConfig(warmup_steps=1),
        engine=EngineConfig(strategy="ddp", timeout_seconds=COLLECTIVE_SECONDS),
        checkpoint=CheckpointConfig(uri=root_uri, interval=100),
        steps=6,
        global_batch=4,
        log_interval=100,
    )


class Observed:
    """One launch of two ranks that train one after another, and each run's lines by name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        data_uri = build_dataset(directory / "dataset")
        observe = ObserveConfig(peak_tflops=PEAK_TFLOPS, profile_start=2, profile_steps=2)
        tiny = tiny_config(data_uri, self.uri("fsdp-full"), observe=observe, log_interval=3)
        zero3 = replace(tiny, engine=tiny_engine("zero3"), observe=replace(observe, profile_start=0))
        zero3 = replace(zero3, checkpoint=replace(zero3.checkpoint, uri=self.uri("zero3")))
        configs = {
            "fsdp-full": tiny,
            "zero3": zero3,
            "slow model": of_troubled(self.uri("slow-model"), model="slow_classifier"),
            "slow data": of_troubled(self.uri("slow-data"), data="slow_samples"),
        }
        scenarios = [
            {"name": name, "config": config.to_json(), "tensorboard_dir": f"{self.uri(name)}/tensorboard"}
            for name, config in configs.items()
        ]
        ranks = run_ranks(
            "distributed.observed_ranks",
            [json.dumps(scenarios)],
            world_size=2,
            timeout_seconds=TIMEOUT_SECONDS,
        )
        assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr[-4000:]
        self.lines = lines_by_name(ranks[0].stdout)

    def uri(self, name: str) -> str:
        return (self.directory / name.replace(" ", "-")).as_uri()


def lines_by_name(stdout: str) -> dict[str, list[StepEvent]]:
    parts = re.split(r'^\{"scenario": "([^"]+)"\}\n', stdout, flags=re.MULTILINE)
    return {name: step_events(lines) for name, lines in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return Observed(tmp_path_factory.mktemp("observed"))


@pytest.mark.parametrize("name", ["fsdp-full", "zero3"])
def test_the_parts_of_a_step_are_no_more_than_the_step(observed: Observed, name: str) -> None:
    lines = observed.lines[name]
    assert [line.step for line in lines] == [1, 3, 6, 9, 12]
    for line in lines:
        computing = [line.forward_seconds, line.backward_seconds, line.optimizer_seconds]
        parts = total([*computing, line.data_seconds, line.checkpoint_seconds, line.evaluation_seconds])
        assert all(part is not None and part > 0 for part in computing)
        assert parts <= known(line.step_seconds)
        assert 0 < known(line.communication_seconds) < total(computing)
    # Saved after steps 4, 8 and 12; of the last there is no line any more.
    assert [known(line.checkpoint_seconds) > 0 for line in lines] == [False, False, True, True, False]


def test_utilisation_follows_from_speed_whatever_the_engine(observed: Observed) -> None:
    for line in (line for name in ("fsdp-full", "zero3") for line in observed.lines[name]):
        # 2 layers of 4 heads of 8 dims over 32 tokens: attention of 12 L H Q T. Matrices: 2 layers of
        # 32 x (32 + 16 + 16 + 32) and 3 x 32 x 52, and a head of 320 x 32.
        matrices = 2 * (32 * 96 + 3 * 32 * 52) + 320 * 32
        flops = 6 * matrices + 12 * 2 * 4 * 8 * 32
        assert line.mfu == pytest.approx(line.tokens_per_second * flops / (2 * PEAK_TFLOPS * 1e12))
        assert known(line.samples_per_second) == pytest.approx(line.tokens_per_second / 32)


def test_a_line_shows_the_memory_of_the_process_and_no_accelerator(observed: Observed) -> None:
    for line in observed.lines["fsdp-full"]:
        assert 2**27 < known(line.peak_memory_bytes) < 2**33
        assert line.accelerator_utilization is None
        assert line.skipped_steps == 0


def test_a_rank_that_computes_longer_is_the_slowest(observed: Observed) -> None:
    line = observed.lines["slow model"][-1]
    assert line.slowest_rank == 1
    assert known(line.slowest_rank_seconds) > SECONDS
    assert known(line.forward_seconds) > SECONDS
    # Of two ranks the median is the mean: the other one is faster by what the slow one computes, less noise.
    assert known(line.median_rank_seconds) < known(line.slowest_rank_seconds) - SECONDS / 4
    assert known(line.communication_seconds) < SECONDS / 2  # it is the other one that waits


def test_a_rank_that_waits_for_its_data_is_the_slowest(observed: Observed) -> None:
    line = observed.lines["slow data"][-1]
    assert line.slowest_rank == 1
    assert known(line.data_seconds) > 2 * SECONDS  # two samples a step
    assert line.mfu is None  # of a model whose arithmetic is not known


def test_every_rank_leaves_a_profile_of_the_steps_asked_for(observed: Observed) -> None:
    root = observed.directory / "fsdp-full" / "profile"
    (attempt,) = {path.name.partition("-")[0] for path in root.iterdir()}
    assert {path.name for path in root.iterdir()} == {
        f"{attempt}-rank{rank}-step2.json.gz" for rank in range(2)
    }
    for path in root.iterdir():
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        steps = [event for event in events if event.get("name", "").startswith("Optimizer.step")]
        assert len(steps) == 2
    assert not (observed.directory / "zero3" / "profile").exists()


def test_tensorboard_reads_back_what_was_logged(observed: Observed) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in ("fsdp-full", "slow model"):
        directory = observed.directory / name.replace(" ", "-") / "tensorboard"
        read = EventAccumulator(str(directory))
        read.Reload()
        lines = observed.lines[name]
        for field in ("loss", "tokens_per_second", "forward_seconds", "peak_memory_bytes"):
            shown = {event.step: event.value for event in read.Scalars(f"train/{field}")}
            # Event files hold single precision.
            assert shown == pytest.approx({line.step: getattr(line, field) for line in lines}, rel=1e-6)
    # One file for each checkpoint, that of the end included.
    assert len(list((observed.directory / "fsdp-full" / "tensorboard").iterdir())) == 3


def test_what_was_measured_is_in_storage(observed: Observed) -> None:
    segments = sorted((observed.directory / "fsdp-full" / "metrics").iterdir())
    stored = [event for path in segments for event in parse_segment(path.read_bytes()).measurements]
    assert stored == observed.lines["fsdp-full"]


def known(value: float | None) -> float:
    assert value is not None
    return value


def total(values: Iterable[float | None]) -> float:
    return sum(known(value) for value in values)


class Hung:
    """Three ranks of which rank 1 comes too late to a collective."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        config = of_troubled(self.root.as_uri(), model="hanging_classifier")
        config = replace(config, global_batch=6)
        self.ranks: list[RankRun] = run_ranks(
            "penstock_trainer.rank",
            [f"--config={config.to_json()}"],
            world_size=3,
            timeout_seconds=TIMEOUT_SECONDS,
        )


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Hung:
    return Hung(tmp_path_factory.mktemp("hung"))


def test_ranks_that_wait_in_vain_leave_their_last_collectives(hung: Hung) -> None:
    assert [rank.returncode for rank in hung.ranks] == [134] * 3, hung.ranks[0].stderr[-4000:]
    for rank in (0, 2):
        told = dump(hung.root, rank)
        assert "all_reduce" in told["error"]
        assert "has taken most of its timeout" in told["error"]
        of_step = [entry for entry in told["gloo"]["entries"] if entry["input_sizes"] == [[18]]]
        assert of_step[-1]["profiling_name"] == "gloo:all_reduce"  # of 8 x 2 weights and 2 biases


def test_the_line_names_the_collective_and_the_rank_that_never_came(hung: Hung) -> None:
    for rank in (0, 2):
        line = next(line for line in hung.ranks[rank].stderr.splitlines() if " waits in " in line)
        assert re.search(rf"rank {rank} waits in .*all_reduce #\d+ \[18\] of gloo:0 since \d+ s", line)
        assert line.endswith("; nothing is heard of rank 1")


def test_a_rank_whose_peers_are_gone_tells_where_it_was(hung: Hung) -> None:
    assert re.search(r"(was last|waits) in \w+ #\d+ ", dump(hung.root, 1)["place"])


def test_what_ended_the_run_is_told_too(hung: Hung) -> None:
    for rank in hung.ranks:
        assert "retryable at step 2" in rank.stderr


def dump(root: Path, rank: int) -> dict[str, Any]:
    (path,) = (root / "flight").glob(f"*-rank{rank}.json")
    told: dict[str, Any] = json.loads(path.read_text())
    return told


def test_a_rank_without_memory_says_what_held_it_and_what_would_help(tmp_path: Path) -> None:
    config = of_troubled((tmp_path / "root").as_uri(), model="too_big_classifier")
    (rank,) = run_ranks("penstock_trainer.rank", [f"--config={config.to_json()}"], world_size=1)
    assert rank.returncode == 1
    assert "can't allocate memory" in rank.stderr
    assert re.search(r"Memory ran out\. Of [\d.]+ GiB at most in use", rank.stderr)
    assert "max_micro_batch 4 (now 8" in rank.stderr
