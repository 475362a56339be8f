"""What a run trains on: token shards that stage_data wrote, or samples of the user's own function."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_trainer.contract.config import JobConfig
from penstock_trainer.contract.dataset import DatasetManifest
from penstock_trainer.data.samples import Samples
from penstock_trainer.data.shards import open_train_split, read_manifest
from penstock_trainer.data.user_dataset import UserDataset, UserSamples
from penstock_trainer.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingData:
    """The train split, ready to be read."""

    samples: Samples
    manifest: DatasetManifest | None
    """Of token shards; None for the user's own."""

    @property
    def vocab_size(self) -> int | None:
        """Of the shards' tokenizer."""
        return self.manifest.tokenizer.vocab_size if self.manifest else None

    @property
    def tokenizer_sha256(self) -> str:
        """Hex; empty where the data has no tokenizer."""
        return self.manifest.tokenizer.sha256 if self.manifest else ""


def open_data(config: JobConfig, world: World) -> TrainingData:
    """Collective. Blocks while shards are brought to this node.

    Raises DatasetError for data that is not there or not as it should be, BatchError when it has no full batch,
    UserFunctionError for a data.source that cannot be called, and StorageError.
    """
    if config.data.source:
        dataset = UserDataset(config.data, "train")
        samples = UserSamples(dataset, global_batch=config.global_batch, seed=config.seed)
        return TrainingData(samples=samples, manifest=None)
    manifest = world.from_primary(lambda: read_manifest(config.data.uri))
    return TrainingData(samples=open_train_split(config.data.uri, manifest, config, world), manifest=manifest)
