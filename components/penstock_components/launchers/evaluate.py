"""Score the model beside the champion on the same held-out documents, and write the run's report.

    python -m penstock_components.launchers.evaluate --executor-input '{{$}}'

Scoring needs torch, which no launcher imports: it runs as a process of its own.
"""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock_components.launchers import executor
from penstock_components.launchers.contracts import read_contract
from penstock_components.launchers.errors import ScoringError
from penstock_components.launchers.evaluation import Evaluation, Scores, improvement
from penstock_components.launchers.registry import CHAMPION, RegisteredVersion, Registry, connect
from penstock_components.launchers.report import render_report
from penstock_trainer.contract.dataset import MANIFEST_NAME as DATASET_MANIFEST
from penstock_trainer.contract.dataset import DatasetManifest
from penstock_trainer.contract.export import MANIFEST_NAME as EXPORT_MANIFEST
from penstock_trainer.contract.export import ExportManifest
from penstock_trainer.contract.fields import ContractError
from penstock_trainer.storage import join, storage_for

log = logging.getLogger(__name__)

SCORER = (sys.executable, "-m", "penstock_trainer.evaluate")


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """Parameters of the task."""

    dataset_uri: str
    model_id: str
    max_bytes: int
    project: str
    location: str


def evaluate(
    task: executor.ExecutorInput,
    *,
    scorer: Sequence[str] = SCORER,
    open_registry: Callable[..., Registry] = connect,
) -> None:
    """Score, then write metrics, report and evaluation."""
    inputs = task.parameters_as(Inputs)
    model = task.input("model")
    export = read_contract(
        join(model.uri, EXPORT_MANIFEST), ExportManifest.from_json, what="model export's manifest"
    )
    dataset = read_contract(
        join(inputs.dataset_uri, DATASET_MANIFEST), DatasetManifest.from_json, what="dataset's manifest"
    )
    registry = open_registry(project=inputs.project, location=inputs.location)
    champion = registry.find_version(inputs.model_id, CHAMPION)
    log.info("champion: %s", champion.resource_name if champion else "none yet")
    evaluation = _adopt(task.output("evaluation").uri, inputs, model.uri, champion)
    if evaluation is None:
        uris = [model.uri, *([champion.artifact_uri] if champion else [])]
        evaluation = _evaluation(inputs.dataset_uri, champion, _score(scorer, inputs, uris))
        _write(task.output("evaluation"), evaluation.to_json(), content_type="application/json")
    report = render_report(evaluation, export, dataset, model_uri=model.uri)
    _write(task.output("report"), report, content_type="text/html")
    executor.write_outputs(task, metadata={"metrics": metrics_of(evaluation)})


def metrics_of(evaluation: Evaluation) -> dict[str, float]:
    """What the console shows as the run's metrics; a number that is not finite or does not exist is left out."""
    challenger, unigram = evaluation.challenger, evaluation.unigram
    numbers = {
        "bits_per_byte": challenger.bits_per_byte,
        "loss": challenger.loss,
        "perplexity": challenger.perplexity,
        "unigram_bits_per_byte": unigram.bits_per_byte,
        "improvement_over_unigram": improvement(challenger.bits_per_byte, unigram.bits_per_byte),
        "champion_bits_per_byte": evaluation.champion.bits_per_byte if evaluation.champion else None,
    }
    return {name: number for name, number in numbers.items() if number is not None}


def _adopt(uri: str, inputs: Inputs, model_uri: str, champion: RegisteredVersion | None) -> Evaluation | None:
    """The scores of an earlier try of this task, if they are of the same models."""
    if storage_for(uri).stat(uri) is None:
        return None
    found = read_contract(uri, Evaluation.from_json, what="evaluation")
    told = (found.dataset_uri, found.challenger.uri, found.champion_name)
    if told != (inputs.dataset_uri, model_uri, champion.resource_name if champion else ""):
        return None
    log.info("%s: adopted, an earlier try has scored the models", uri)
    return found


def _write(artifact: executor.Artifact, text: str, *, content_type: str) -> None:
    storage_for(artifact.uri).write(artifact.uri, text.encode(), content_type=content_type)


def _score(scorer: Sequence[str], inputs: Inputs, model_uris: Sequence[str]) -> Scores:
    """Run the scorer on the models and read what it wrote. Blocks until it ends; it shares our stdout and stderr."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "scores.json"
        command = [
            *scorer,
            f"--data={inputs.dataset_uri}",
            *(f"--model={uri}" for uri in model_uris),
            f"--output={output}",
            *([f"--max-bytes={inputs.max_bytes}"] if inputs.max_bytes else []),
        ]
        exit_code = subprocess.run(command, check=False).returncode
        if exit_code != 0:
            raise ScoringError(
                f"scoring {' and '.join(model_uris)} on {inputs.dataset_uri} failed with exit code {exit_code}; what the "
                f"scorer wrote stands above. Command: {' '.join(command)}"
            )
        try:
            scores = Scores.from_json(output.read_bytes())
        except (FileNotFoundError, ContractError) as exc:
            raise ScoringError(f"the scorer ended well but its output is not scores: {exc}") from exc
    if [score.uri for score in scores.models] != list(model_uris):
        raise ScoringError(
            f"asked for scores of {list(model_uris)}, got those of {[score.uri for score in scores.models]}."
        )
    return scores


def _evaluation(dataset_uri: str, champion: RegisteredVersion | None, scores: Scores) -> Evaluation:
    return Evaluation(
        dataset_uri=dataset_uri,
        documents=scores.documents,
        bytes=scores.bytes,
        unigram=scores.unigram,
        challenger=scores.models[0],
        champion=scores.models[1] if champion else None,
        champion_name=champion.resource_name if champion else "",
    )


def main(
    argv: Sequence[str] | None = None,
    *,
    scorer: Sequence[str] = SCORER,
    open_registry: Callable[..., Registry] = connect,
) -> int:
    """Exit code of the task."""
    return executor.run(functools.partial(evaluate, scorer=scorer, open_registry=open_registry), argv)


if __name__ == "__main__":
    sys.exit(main())
