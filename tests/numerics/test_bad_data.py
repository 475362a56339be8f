"""Data and weights that cannot be trained on: the run ends before an update, with one cause on every node, leaving nobody."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
from safetensors.torch import save_file

from distributed.tiny_dataset import VOCAB_SIZE, build_dataset
from distributed.tiny_run import step_events, tiny_config, windows_in_place
from penstock_trainer.contract.config import DataConfig, JobConfig, ModelConfig
from penstock_trainer.contract.dataset import DatasetManifest
from penstock_trainer.data.order import sample_order
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.hugging_face import hf_config, hf_name
from penstock_trainer.storage import crc32c
from penstock_trainer.testing import RankRun, run_cluster

# Of the step-1 batch of 12, ranks 0 and 1 take 6 each: rank 1 alone sees this sample.
SAMPLE_OF_RANK_1 = 8
# Well below what a collective without its peer would wait (tiny_config's 60 s).
TIMEOUT_SECONDS = 45.0


def train(config: JobConfig) -> list[RankRun]:
    command = [sys.executable, "-m", "penstock_trainer", f"--config={config.to_json()}"]
    return run_cluster([command] * 2, timeout_seconds=TIMEOUT_SECONDS)


def assert_ended_at_once(nodes: list[RankRun], cause: str) -> None:
    """A failure of the run's own, which a restart would only repeat."""
    assert [node.returncode for node in nodes] == [1, 1], nodes
    for node in nodes:
        assert "restart 1 of" not in node.stderr
        verdict = node.stderr.partition("exit code 1: ")[2].splitlines()[0]
        assert cause in verdict, node.stderr
    assert step_events(nodes[0].stdout) == []


def left_behind(directory: Path) -> Iterator[psutil.Process]:
    """Processes whose command line names the directory."""
    for process in psutil.process_iter():
        try:
            if str(directory) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue


def assert_none_left(directory: Path) -> None:
    deadline = time.monotonic() + 5.0  # the kernel's own time to reap
    while left := list(left_behind(directory)):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def put_token(directory: Path, config: JobConfig, *, sample: int, token: int) -> None:
    """Change one token of a sample of the run, in a shard that its manifest still vouches for."""
    told = json.loads((directory / "manifest.json").read_text())
    windows = windows_in_place(directory, DatasetManifest.from_json(json.dumps(told)), config)
    [window] = windows.windows_of(sample, 1)
    at = int(window) * config.data.seq_len + 3
    for shard in told["train"]:
        tokens = np.fromfile(directory / shard["name"], dtype="<u2")
        if at < len(tokens):
            tokens[at] = token
            tokens.tofile(directory / shard["name"])
            shard["crc32c"] = crc32c(tokens.tobytes())
            break
        at -= len(tokens)
    (directory / "manifest.json").write_text(json.dumps(told))


def test_a_token_id_outside_the_vocabulary_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    data_uri = build_dataset(tmp_path / "dataset")
    config = tiny_config(data_uri, (tmp_path / "checkpoints").as_uri())
    put_token(tmp_path / "dataset", config, sample=60, token=VOCAB_SIZE)

    nodes = train(config)

    assert_ended_at_once(nodes, f"has a token id outside the vocabulary: {VOCAB_SIZE}, and")
    assert_none_left(tmp_path)


def test_a_sample_that_is_no_number_ends_the_run_before_its_step(tmp_path: Path) -> None:
    config = tiny_config("", (tmp_path / "checkpoints").as_uri(), strategy="ddp")
    [bad] = sample_order(SAMPLE_OF_RANK_1, 1, size=64, seed=config.seed).tolist()
    config = replace(
        config,
        model=ModelConfig(source="numerics.bad_samples:classifier"),
        data=DataConfig(source="numerics.bad_samples:points", options={"bad": [bad]}),
    )

    nodes = train(config)

    assert_ended_at_once(nodes, "DatasetError: 'x' is not finite in samples")
    assert_none_left(tmp_path)


def test_weights_that_are_no_numbers_are_named_before_the_first_step(tmp_path: Path) -> None:
    config = tiny_config(build_dataset(tmp_path / "dataset"), (tmp_path / "checkpoints").as_uri())
    write_model_with_nan(tmp_path / "model", config.model)

    nodes = train(replace(config, model=ModelConfig(source=(tmp_path / "model").as_uri())))

    assert_ended_at_once(nodes, "the weight layers.1.mlp.up_proj.weight has values that are not finite")
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    assert_none_left(tmp_path)


def write_model_with_nan(directory: Path, shape: ModelConfig) -> None:
    model = Decoder(shape, VOCAB_SIZE)
    model.initialize(0)
    weights = {hf_name(name): weight.detach() for name, weight in model.named_parameters()}
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    directory.mkdir()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    told = hf_config(shape, vocab_size=VOCAB_SIZE, seq_len=64, eos_id=0)
    (directory / "config.json").write_text(json.dumps(told))
