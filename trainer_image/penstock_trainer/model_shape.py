"""The parameters of the model that a config names, as JSON, for a plan that is made where there is no torch.

    python -m penstock_trainer.model_shape --config=<JSON of the job config> [--vocab-size=<ids>]

Prints {"parameters": [{"name", "shape", "block", "is_trained"}, ...], "decoder", "vocab_size", "buffers"}: the tensors of
`named_parameters()`, each with the block that engines shard, recompute and compile as one (null: none); the shape of the
built-in decoder where the model is one; and the bytes of the buffers. No weights are read and none are made, except by a
user's function, which is called as it is for training. `--vocab-size` is the dataset's, for a model without a source.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import nn

from penstock_trainer.contract.config import JobConfig, ModelConfig
from penstock_trainer.contract.fields import ContractError, canonical_json, parse_json
from penstock_trainer.engines.blocks import find_blocks
from penstock_trainer.errors import ModelError, TrainerError
from penstock_trainer.model.build import build_model, in_transformers
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.hugging_face import covers, model_config, read_config
from penstock_trainer.model.source_directory import is_directory, source_directory
from penstock_trainer.storage import StorageError


def main(argv: Sequence[str]) -> int:
    """Print the shape and return the exit code: 2 for a model that cannot be told, with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m penstock_trainer.model_shape")
    parser.add_argument("--config", required=True, help="the job config as JSON")
    parser.add_argument(
        "--vocab-size", type=int, default=0, help="of the dataset; for a model without a source"
    )
    arguments = parser.parse_args(argv)
    try:
        config = parse_json(JobConfig, arguments.config, "--config (the output of JobConfig.to_json())")
        told = model_shape(config, vocab_size=arguments.vocab_size)
    except (ContractError, StorageError, TrainerError) as exc:
        sys.stderr.write(f"{type(exc).__name__}: {exc}\n")
        return 2
    sys.stdout.write(canonical_json(told) + "\n")
    return 0


def model_shape(config: JobConfig, *, vocab_size: int = 0) -> dict[str, Any]:
    """What is printed. Blocks on storage for a model there.

    Raises ModelError, UserFunctionError and StorageError as `build_model` does, and EngineError as `find_blocks` does.
    """
    model, decoder, vocab_size = _model(config, vocab_size)
    blocks, _ = find_blocks(model, config.engine.wrap_class)
    block_of = {id(tensor): index for index, block in enumerate(blocks) for tensor in block.parameters()}
    parameters = [
        {
            "name": name,
            "shape": list(tensor.shape),
            "block": block_of.get(id(tensor)),
            "is_trained": tensor.requires_grad,
        }
        for name, tensor in model.named_parameters()
    ]
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return {"parameters": parameters, "decoder": decoder, "vocab_size": vocab_size, "buffers": buffers}


def _model(config: JobConfig, vocab_size: int) -> tuple[nn.Module, ModelConfig | None, int]:
    """The model, and the decoder's config and vocabulary where it is the built-in one."""
    source = config.model.source
    if not source:
        if vocab_size < 1:
            raise ModelError(
                "a model without a source has the vocabulary of its dataset. Give --vocab-size, at least 1."
            )
        return _decoder(config.model, vocab_size)
    if not is_directory(source):
        return build_model(config.model, vocab_size=None, seed=config.seed), None, 0
    with source_directory(source) as directory:
        told = read_config(directory, source_uri=source)
        if config.model.native and covers(told):
            return _decoder(model_config(told, dropout=config.model.dropout), int(told["vocab_size"]))
        return _of_transformers(directory, source), None, 0


def _decoder(config: ModelConfig, vocab_size: int) -> tuple[nn.Module, ModelConfig, int]:
    return _Unfilled(config, vocab_size), config, vocab_size


class _Unfilled(Decoder):
    """The decoder as it is while it is built: on the meta device."""

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:  # noqa: ARG002  # nn.Module's signature
        """Stay there."""
        return self


def _of_transformers(directory: Path, source: str) -> nn.Module:
    """As penstock_trainer.model.build makes it, on the meta device."""
    told, auto = in_transformers(directory, source)
    try:
        with torch.device("meta"):
            return cast("nn.Module", auto.from_config(told))
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        raise ModelError(f"transformers cannot make the model of {source}: {exc}") from exc


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
