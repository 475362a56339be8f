"""Export the model of a checkpoint, in one process: what the trainer writes at its end, of any step.

    python -m penstock_trainer.export_checkpoint --root=<checkpoint root> --step=N --to=<directory>
        [--data=<dataset>] [--replace]

URIs are gs:// or file://. The weights are fp32, whichever strategy and number of ranks wrote them; the optimizer's state is
not read. Needs memory for the model twice.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from penstock_trainer.checkpoint_root import CheckpointRoot
from penstock_trainer.checkpoints.reader import ObjectReader
from penstock_trainer.contract.checkpoint import CheckpointObject, Manifest, step_dir_uri
from penstock_trainer.contract.config import DataConfig, ModelConfig
from penstock_trainer.contract.dataset import DatasetManifest
from penstock_trainer.contract.events import measurements_to_jsonl
from penstock_trainer.contract.export import FORMAT_VERSION, MANIFEST_NAME, ExportManifest
from penstock_trainer.contract.fields import ContractError, from_dict
from penstock_trainer.data.shards import read_manifest
from penstock_trainer.errors import CheckpointError, DatasetError, ExportError, TrainerError
from penstock_trainer.export import write_export
from penstock_trainer.metrics import join_segments, parse_segment
from penstock_trainer.model.buffers import persistent_buffers
from penstock_trainer.model.build import build_model
from penstock_trainer.observe.structured_logs import log_to_stderr
from penstock_trainer.storage import StorageError, UnsupportedUriError, join, storage_for

logger = logging.getLogger(__name__)


def export_checkpoint(
    root: CheckpointRoot, step: int, target_uri: str, *, data_uri: str = "", replace: bool = False
) -> None:
    """Write the export of one step. Blocks on storage.

    `data_uri` is where the dataset lies whose tokenizer is exported, by default where the run read it. Raises ExportError
    when an export stands at the target and is not to be replaced, CheckpointError for a checkpoint that is damaged or does
    not fit its own model, DatasetError for another tokenizer than it was trained with, what `build_model` raises,
    ContractError and StorageError.
    """
    _require_free(target_uri, replace=replace)
    manifest = root.whole(step)
    config = from_dict(ModelConfig, manifest.config["model"])
    data = from_dict(DataConfig, manifest.config["data"])
    data_uri = data_uri or data.uri
    dataset = None if data.source else _dataset(data_uri, manifest)
    vocab_size = dataset.tokenizer.vocab_size if dataset else None
    model = build_model(config, vocab_size=vocab_size, seed=0)
    weights = read_weights(root, manifest, model)
    write_export(
        target_uri,
        weights=weights,
        model=model,
        seq_len=data.seq_len,
        dataset_uri=data_uri,
        dataset=dataset,
        metrics=_metrics(root, step),
        manifest_of=lambda objects: _manifest(objects, manifest, root.uri, data_uri, model),
        check_owner=lambda: None,  # the directory is the caller's, and no run's
    )
    logger.info("exported step %d of %s to %s", step, root.uri, target_uri)


def read_weights(root: CheckpointRoot, manifest: Manifest, model: nn.Module) -> dict[str, Tensor]:
    """Fill a model on CPU from a checkpoint; its parameters and persistent buffers, by name.

    Raises CheckpointError when a part is missing, corrupt, or of another shape.
    """
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights |= persistent_buffers(model)
    uri = step_dir_uri(root.uri, manifest.step)
    reader = ObjectReader(root.storage, uri, manifest)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp_load({"model": weights}, storage_reader=reader, no_dist=True)
    except CheckpointException as exc:  # not an Exception
        reasons = "; ".join(str(failure) for failure, _ in exc.failures.values())
        raise CheckpointError(f"{uri} cannot be read into its model: {reasons}") from exc
    return weights


def _require_free(target_uri: str, *, replace: bool) -> None:
    uri = join(target_uri, MANIFEST_NAME)
    if not replace and storage_for(uri).stat(uri) is not None:
        raise ExportError(
            f"there is an export at {target_uri} already. Give --replace, or another directory."
        )


def _dataset(data_uri: str, manifest: Manifest) -> DatasetManifest:
    try:
        dataset = read_manifest(data_uri)
    except DatasetError as exc:
        raise DatasetError(
            f"{exc} The export needs its tokenizer: say with --data where it lies now."
        ) from exc
    if dataset.tokenizer.sha256 != manifest.tokenizer_sha256:
        raise DatasetError(
            f"{data_uri} has another tokenizer than the checkpoint was trained with: sha256 {dataset.tokenizer.sha256} "
            f"instead of {manifest.tokenizer_sha256}. Say with --data where that dataset lies."
        )
    return dataset


def _metrics(root: CheckpointRoot, step: int) -> bytes:
    """What the run measured up to the step; nothing for a copy of a root, which has no segments."""
    infos = root.storage.list_objects(join(root.uri, "metrics") + "/")
    joined = join_segments(parse_segment(root.storage.read(info.uri)) for info in infos)
    return measurements_to_jsonl([one for one in joined if one.step <= step])


def _manifest(
    objects: tuple[CheckpointObject, ...], manifest: Manifest, root_uri: str, data_uri: str, model: nn.Module
) -> ExportManifest:
    config: Mapping[str, Any] = manifest.config
    return ExportManifest(
        format_version=FORMAT_VERSION,
        step=manifest.step,
        tokens_seen=manifest.tokens_seen,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        config=config,
        config_hash=manifest.config_hash,
        dataset_uri=data_uri,
        world_size=manifest.world_size,
        attempt=manifest.attempt,
        checkpoint_uri=step_dir_uri(root_uri, manifest.step),
        objects=objects,
    )


def main(argv: Sequence[str]) -> int:
    """Export as the command line says; 0, or 1 when it could not be done, 2 for arguments that are none."""
    parser = argparse.ArgumentParser(prog="python -m penstock_trainer.export_checkpoint", allow_abbrev=False)
    parser.add_argument("--root", required=True, help="directory of the step directories, gs:// or file://")
    parser.add_argument("--step", required=True, type=int)
    parser.add_argument("--to", required=True, help="directory of the export, gs:// or file://")
    parser.add_argument("--data", default="", help="dataset directory; default: where the run read it")
    parser.add_argument("--replace", action="store_true", help="replace an export that stands there")
    arguments = parser.parse_args(argv)
    log_to_stderr(logging.INFO)
    try:
        export_checkpoint(
            CheckpointRoot(arguments.root),
            arguments.step,
            arguments.to,
            data_uri=arguments.data,
            replace=arguments.replace,
        )
    except UnsupportedUriError as exc:
        parser.error(str(exc))
    except (TrainerError, StorageError, ContractError) as exc:
        logger.error("%s: %s", type(exc).__name__, exc)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
