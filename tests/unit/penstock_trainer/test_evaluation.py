"""What is scored while a model trains, which step is best, and what a tuning trial reports."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import tiny_config
from penstock_trainer.checkpoints.progress import Progress
from penstock_trainer.contract.checkpoint import Best
from penstock_trainer.contract.config import DataConfig, EvaluationConfig, JobConfig, ModelConfig
from penstock_trainer.data.batch_plan import BatchPlan
from penstock_trainer.data.held_out import held_out_documents, held_out_windows
from penstock_trainer.data.shards import read_manifest
from penstock_trainer.engines import build_engine
from penstock_trainer.errors import CheckpointError, DatasetError, DivergedError, TuningError
from penstock_trainer.evaluation import Evaluation, improves, open_evaluation
from penstock_trainer.model.build import build_model
from penstock_trainer.model.objective import IGNORED, Batch, Objective
from penstock_trainer.preemption import Preemption
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.trainer import Trainer
from penstock_trainer.tuning import TuningReport
from penstock_trainer.world import World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World.join(RankEnv(omp_num_threads=1), timeout_seconds=30) as world:
        yield world


@pytest.fixture(scope="module")
def data_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_dataset(tmp_path_factory.mktemp("data") / "dataset")


def evaluated(data_uri: str, root: Path | None = None, **settings: Any) -> JobConfig:
    config = tiny_config(data_uri, root.as_uri() if root else "", strategy="ddp")
    return replace(config, evaluation=EvaluationConfig(**{"interval": 4, **settings}))


# Samples


@pytest.mark.parametrize("max_samples", [1, 5, 0])
@pytest.mark.parametrize("chunk_tokens", [0, 7])
def test_the_first_samples_are_scored_and_each_target_once(
    world: World, data_uri: str, max_samples: int, chunk_tokens: int
) -> None:
    config = evaluated(data_uri, max_samples=max_samples)
    manifest = read_manifest(data_uri)
    model: Any = build_model(config.model, vocab_size=manifest.tokenizer.vocab_size, seed=1)
    engine = build_engine(Objective(model, chunk_tokens=chunk_tokens), config, BatchPlan.of(config, 1), world)
    scores = open_evaluation(config, manifest, engine, world).run()

    tokenizer = Tokenizer.from_file(str(Path(data_uri.removeprefix("file://")) / "tokenizer.json"))
    documents = held_out_documents(data_uri, manifest)
    windows = list(
        held_out_windows(tokenizer, documents, eos_id=manifest.tokenizer.eos_id, seq_len=config.data.seq_len)
    )
    loss, right, targets = 0.0, 0, 0
    for window in windows[: max_samples or None]:
        tokens = torch.tensor(window)
        with torch.no_grad():
            logits = model.eval()(tokens[None, :-1])[0].double()
        loss -= logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].sum().item()
        right += int((logits.argmax(-1) == tokens[1:]).sum())
        targets += len(tokens) - 1
    assert scores.targets == targets
    assert scores.loss == pytest.approx(loss / targets, rel=1e-6)  # fp32 against fp64
    assert scores.accuracy == pytest.approx(right / targets)


def test_a_dataset_without_held_out_text_is_refused_and_says_what_to_do(world: World, data_uri: str) -> None:
    manifest = replace(read_manifest(data_uri), evaluation=())
    with pytest.raises(DatasetError, match=r"no held-out text.*set evaluation\.interval to 0"):
        open_evaluation(evaluated(data_uri), manifest, Scorer(0.0), world)


class Scorer:
    """As much of an engine as evaluation calls; gives each batch the same loss."""

    def __init__(self, loss: float) -> None:
        self._loss = loss

    def evaluate(self, batch: Batch) -> torch.Tensor:
        return torch.tensor([self._loss, 1.0])


class Samples:
    """Two samples, of which `targets` labels are targets."""

    def __init__(self, targets: int) -> None:
        self._labels = torch.tensor([3] * targets + [IGNORED] * (2 - targets))

    def __len__(self) -> int:
        return 2

    def batch(self, indices: Any) -> Batch:
        return {"labels": self._labels[list(indices)]}


def test_samples_without_a_target_are_refused(world: World) -> None:
    with pytest.raises(DatasetError, match="have no target"):
        Evaluation(Scorer(0.0), Samples(0), batch_size=1, world=world).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_run(world: World, loss: float) -> None:
    with pytest.raises(DivergedError, match=f"held-out samples is {loss}"):
        Evaluation(Scorer(loss), Samples(2), batch_size=1, world=world).run()  # type: ignore[arg-type]


# Best


@pytest.mark.parametrize(
    ("metric", "min_improvement", "best", "value", "expected"),
    [
        ("loss", 0.0, None, 9.0, True),
        ("loss", 0.0, 2.0, 1.9, True),
        ("loss", 0.0, 2.0, 2.0, False),
        ("loss", 0.25, 2.0, 1.75, False),
        ("loss", 0.25, 2.0, 1.5, True),
        ("accuracy", 0.0, 0.5, 0.6, True),
        ("accuracy", 0.0, 0.5, 0.4, False),
        ("accuracy", 0.25, 0.5, 0.75, False),
    ],
)
def test_a_value_is_better_by_more_than_the_least_improvement(
    metric: Any, min_improvement: float, best: float | None, value: float, expected: bool
) -> None:
    config = EvaluationConfig(interval=1, metric=metric, min_improvement=min_improvement)
    before = Best(step=1, value=best) if best is not None else None
    assert improves(value, before, config) is expected


def test_evaluations_since_the_best_are_counted() -> None:
    progress = Progress(step=4).evaluated(2.0, is_best=True)
    assert (progress.best, progress.stale_evaluations) == (Best(step=4, value=2.0), 0)
    progress = replace(progress, step=8).evaluated(2.5, is_best=False).evaluated(2.5, is_best=False)
    assert (progress.best, progress.stale_evaluations) == (Best(step=4, value=2.0), 2)
    assert replace(progress, step=9).evaluated(1.0, is_best=True).stale_evaluations == 0


def test_the_best_steps_checkpoint_that_is_gone_is_an_error_that_names_it(
    world: World, data_uri: str, tmp_path: Path
) -> None:
    # Nothing improves by 1.0 on the first evaluation.
    config = evaluated(data_uri, tmp_path / "root", min_improvement=1.0, export_best=True)
    told = replace(world, env=replace(world.env, model_dir=(tmp_path / "model").as_uri()))
    assert Trainer(config, told, Preemption()).fit() == "done"
    (tmp_path / "root/step-00000004/manifest.json").unlink()
    trainer = Trainer(config, told, Preemption())
    assert trainer.progress.best is not None
    assert (trainer.progress.step, trainer.progress.best.step) == (12, 4)
    with pytest.raises(
        CheckpointError, match=r"checkpoint of step 4 is gone or damaged: .*root.*export_best"
    ):
        trainer.fit()


@pytest.mark.parametrize(
    ("changed", "is_kept"),
    [({"min_improvement": 0.5}, True), ({"metric": "accuracy"}, False), ({"max_samples": 3}, False)],
)
def test_the_best_of_another_measure_is_forgotten(
    world: World, data_uri: str, tmp_path: Path, changed: dict[str, Any], is_kept: bool
) -> None:
    config = evaluated(data_uri, tmp_path / "root")
    Trainer(replace(config, steps=4), world, Preemption()).fit()
    config = replace(config, evaluation=replace(config.evaluation, **changed))
    assert (Trainer(config, world, Preemption()).progress.best is not None) is is_kept


def test_evaluations_stand_beside_the_steps_in_what_the_run_measured(
    world: World, data_uri: str, tmp_path: Path
) -> None:
    trainer = Trainer(evaluated(data_uri, tmp_path / "root"), world, Preemption())
    trainer.fit()
    lines = [json.loads(line) for line in trainer.metrics.joined().splitlines()]
    assert [line["step"] for line in lines if "event" not in line] == list(range(1, 13))
    of_evaluation = [line for line in lines if line.get("event") == "evaluation"]
    assert [line["step"] for line in of_evaluation] == [4, 8, 12]
    assert all(line["best"] for line in of_evaluation), "the run must learn"


# The user's own data


def test_the_users_evaluation_split_is_scored(world: World) -> None:
    config = JobConfig(
        model=ModelConfig(source="penstock_trainer.model.digits:digits_classifier"),
        data=DataConfig(source="penstock_trainer.model.digits:digits"),
        evaluation=EvaluationConfig(interval=1, max_samples=100),
    )
    model = build_model(config.model, vocab_size=None, seed=1)
    config = replace(config, engine=replace(config.engine, strategy="ddp"))
    engine = build_engine(Objective(model), config, BatchPlan.of(config, 1), world)
    scores = open_evaluation(config, None, engine, world).run()
    assert scores.targets == 100
    assert 1.5 < scores.loss < 3.0, "untrained: near ln 10"


# Hyperparameter tuning


def test_a_trials_primary_reports_each_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics/output.metrics"
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(path))
    report = TuningReport(RankEnv(trial_id="7"), evaluates=True)
    report.report("accuracy", 0.25, step=10)
    report.report("accuracy", 0.5, step=20)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    told = [{name: line[name] for name in ("trial", "accuracy", "global_step")} for line in lines]
    assert told == [
        {"trial": "7", "accuracy": "0.25", "global_step": "10"},
        {"trial": "7", "accuracy": "0.5", "global_step": "20"},
    ]


@pytest.mark.parametrize("env", [RankEnv(), RankEnv(rank=1, world_size=2, trial_id="7")])
def test_nobody_else_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: RankEnv) -> None:
    path = tmp_path / "metrics/output.metrics"
    monkeypatch.setenv("CLOUD_ML_HP_METRIC_FILE", str(path))
    TuningReport(env, evaluates=True).report("loss", 1.0, step=1)
    assert not path.parent.exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trial_that_cannot_report_is_refused_on_every_rank(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setitem(sys.modules, "hypertune", None)  # as where it is not installed
    with pytest.raises(TuningError, match=r"trial 7 .*pip install 'penstock\[trainer\]'"):
        TuningReport(RankEnv(rank=rank, world_size=2, trial_id="7"), evaluates=True)


def test_a_trial_without_evaluation_is_refused_and_no_other_run() -> None:
    with pytest.raises(TuningError, match=r"trial 7 .*evaluation\.interval is 0"):
        TuningReport(RankEnv(rank=1, world_size=2, trial_id="7"), evaluates=False)
    TuningReport(RankEnv(), evaluates=False)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ""),
        ({"CLOUD_ML_TRIAL_ID": "3"}, "3"),
        ({"CLUSTER_SPEC": '{"task": {"type": "workerpool0", "index": 0, "trial": "4"}}'}, "4"),
        ({"CLUSTER_SPEC": '{"task": {"type": "workerpool0", "index": 0, "trial": ""}}'}, ""),
        ({"CLUSTER_SPEC": '{"task": {"type": "workerpool0", "index": 0}}'}, ""),
        ({"CLUSTER_SPEC": '{"task": null}'}, ""),
        ({"CLUSTER_SPEC": "no JSON"}, ""),
        ({"CLOUD_ML_TRIAL_ID": "3", "CLUSTER_SPEC": '{"task": {"trial": "4"}}'}, "3"),
    ],
)
def test_a_trial_is_known_by_its_environment(environ: dict[str, str], expected: str) -> None:
    assert RankEnv.from_environ(environ).trial_id == expected
