"""What an export holds, and who may write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import tiny_config
from penstock_trainer.checkpoints.ownership import check_ownership, take_ownership
from penstock_trainer.contract.config import RopeScaling
from penstock_trainer.contract.export import ExportManifest
from penstock_trainer.data.shards import read_manifest
from penstock_trainer.errors import FencedError
from penstock_trainer.export import read_export, write_export
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.storage import FileStorage


class Exports:
    """Attempts of one run that export models of their own, told apart by the seed of their weights."""

    def __init__(self, directory: Path, **shape: Any) -> None:
        self.uri = (directory / "model").as_uri()
        self._root_uri = (directory / "root").as_uri()
        config = tiny_config(build_dataset(directory / "dataset"))
        self._config = replace(config, model=replace(config.model, **shape))
        self._dataset = read_manifest(self._config.data.uri)

    def attempt(self, seed: int) -> Callable[..., None]:
        """Take the run over; what it returns exports, and calls `pause(n)` after its n-th check of the owner."""
        owner = take_ownership(self._root_uri, FileStorage())
        model = Decoder(self._config.model, self._dataset.tokenizer.vocab_size)
        model.initialize(seed)
        checks = 0

        def export(pause: Callable[[int], None] = lambda _: None) -> None:
            def check() -> None:
                nonlocal checks
                check_ownership(self._root_uri, owner, FileStorage())
                checks += 1
                pause(checks)

            write_export(
                self.uri,
                weights=model.state_dict(),
                model=model,
                seq_len=32,
                dataset_uri=self._config.data.uri,
                dataset=self._dataset,
                metrics=b"",
                manifest_of=lambda objects: self._manifest(owner.attempt, objects),
                check_owner=check,
            )

        return export

    def value(self) -> float:
        """Tells whose model it is that can be read."""
        model: Any = read_export(self.uri).model
        return float(model.embed_tokens.weight[0, 0].detach())

    def _manifest(self, attempt: str, objects: Any) -> ExportManifest:
        return ExportManifest(
            format_version=1,
            step=12,
            tokens_seen=1,
            num_parameters=1,
            config={},
            config_hash=self._config.hash,
            dataset_uri=self._config.data.uri,
            world_size=1,
            attempt=attempt,
            checkpoint_uri=self._root_uri,
            objects=objects,
        )


@pytest.mark.parametrize(
    "shape",
    [
        {"family": "llama", "rope_scaling": RopeScaling(kind="linear", factor=2.0)},
        {"family": "mistral", "sliding_window": 5, "head_dim": 6},
        {"family": "qwen2"},
        {"family": "qwen3", "head_dim": 16, "tie_embeddings": True},
    ],
    ids=lambda shape: shape["family"],
)
def test_an_export_of_every_family_is_loaded_by_transformers_and_by_us(
    shape: dict[str, Any], tmp_path: Path
) -> None:
    exports = Exports(tmp_path, **shape)
    exports.attempt(1)()
    export = read_export(exports.uri)
    ours: Any = export.model
    told = export.config
    assert {name: getattr(ours.config, name) for name in shape} == shape
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    tokens = torch.arange(20).reshape(2, 10) % told["vocab_size"]
    # fp32, the order of sums differs.
    torch.testing.assert_close(ours.eval()(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == told["vocab_size"]


@pytest.mark.parametrize("stands", [False, True])
@pytest.mark.parametrize("check", range(1, 8))  # before the withdrawal, each of 5 files, and the manifest
def test_a_writer_that_is_overtaken_after_any_check_leaves_its_successors_export(
    tmp_path: Path, check: int, stands: bool
) -> None:
    exports = Exports(tmp_path)
    if stands:
        exports.attempt(1)()
    old = exports.attempt(2)
    values = []

    def pause(done: int) -> None:
        if done == check:
            exports.attempt(3)()
            values.append(exports.value())

    with pytest.raises(FencedError):
        old(pause)
    assert [exports.value()] == values


def test_a_late_write_of_the_attempt_before_does_not_stop_the_owner(tmp_path: Path) -> None:
    exports = Exports(tmp_path)
    exports.attempt(1)()

    def pause(done: int) -> None:
        if done == 2:  # after the owner has seen in which generation the weights stand
            weights = tmp_path / "model/model.safetensors"
            FileStorage().write(weights.as_uri(), b"late")

    exports.attempt(2)(pause)
    second = exports.value()
    exports.attempt(1)()
    assert exports.value() != second
