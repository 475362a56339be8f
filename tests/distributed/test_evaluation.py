"""Evaluation inside of training: the same scores from every strategy and world size, and what follows from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import LOSS_TOLERANCE, events_by_scenario, tiny_config
from penstock_trainer.contract.checkpoint import Best, Manifest, manifest_uri
from penstock_trainer.contract.config import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    JobConfig,
    ModelConfig,
    OptimConfig,
    Strategy,
)
from penstock_trainer.contract.events import (
    EvaluationEvent,
    StepEvent,
    measurements_from_jsonl,
)
from penstock_trainer.contract.export import ExportManifest
from penstock_trainer.errors import ExportError
from penstock_trainer.evaluate import main, score_model
from penstock_trainer.export import read_export
from penstock_trainer.storage import FileStorage
from penstock_trainer.testing import run_ranks

STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp-full", "fsdp-hybrid", "zero1", "zero2", "zero3")
DROPS = (1, 3, 5, 8)
"""Steps after which a run is cut off: before, at and after evaluations and saves."""
TIMEOUT_SECONDS = 250.0


@dataclass
class Trained:
    """What one scenario has printed."""

    losses: dict[int, float] = field(default_factory=dict)
    scores: dict[int, EvaluationEvent] = field(default_factory=dict)

    @property
    def decisions(self) -> dict[int, tuple[float, float, bool]]:
        return {step: (one.loss, one.accuracy, one.best) for step, one in self.scores.items()}


class Runs:
    """Launches of training_ranks.py in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.found: dict[str, Trained] = {}
        self._scenarios: list[dict[str, Any]] = []

    def add(self, name: str, config: JobConfig, *, root: str = "", drop_out_at: int | None = None) -> None:
        """A scenario of the next launch. It exports unless it drops out."""
        config = replace(config, checkpoint=replace(config.checkpoint, uri=self.uri(root or name)))
        model_dir = "" if drop_out_at else self.uri(f"{root or name}-model")
        self._scenarios.append(
            {"name": name, "config": config.to_json(), "drop_out_at": drop_out_at, "model_dir": model_dir}
        )

    def launch(self, world_size: int, env: Mapping[str, str] | None = None) -> None:
        ranks = run_ranks(
            "distributed.training_ranks",
            [json.dumps(self._scenarios)],
            world_size=world_size,
            env=env,
            timeout_seconds=TIMEOUT_SECONDS,
        )
        self._scenarios = []
        assert [rank.returncode for rank in ranks] == [0] * world_size, ranks[0].stderr[-6000:]
        for name, events in events_by_scenario(ranks[0].stdout).items():
            trained = self.found.setdefault(name, Trained())
            for event in events:
                if isinstance(event, StepEvent):
                    assert event.loss is not None
                    trained.losses[event.step] = event.loss
                elif isinstance(event, EvaluationEvent):
                    trained.scores[event.step] = event

    def uri(self, name: str) -> str:
        return (self.directory / name.replace(" ", "-")).as_uri()

    def manifest(self, root: str, step: int) -> Manifest:
        return Manifest.from_json(FileStorage().read(manifest_uri(self.uri(root), step)))

    def saved(self, root: str) -> list[int]:
        directories = (self.directory / root.replace(" ", "-")).glob("step-*/manifest.json")
        return sorted(int(path.parent.name.removeprefix("step-")) for path in directories)

    def export(self, root: str) -> ExportManifest:
        return ExportManifest.from_json(FileStorage().read(f"{self.uri(root)}-model/manifest.json"))


# Text


def evaluated(data_uri: str, strategy: Strategy = "fsdp-full", **settings: Any) -> JobConfig:
    config = tiny_config(data_uri, strategy=strategy)
    evaluation = EvaluationConfig(**{"interval": 6, "max_samples": 0, **settings})
    return replace(config, evaluation=evaluation)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("text"))
    data_uri = build_dataset(runs.directory / "dataset")
    for strategy in STRATEGIES:
        # No later step is better by so much: the first that is evaluated stays the best.
        runs.add(strategy, evaluated(data_uri, strategy, min_improvement=2.0, export_best=True))
        runs.add(f"{strategy} alone", tiny_config(data_uri, strategy=strategy))
    stopping = evaluated(data_uri, interval=2, max_samples=7, min_improvement=2.0, patience=3)
    runs.add("stopped", stopping)
    runs.add("stopped again", stopping, root="stopped")
    for drop in DROPS:
        runs.add(f"dropped {drop}", stopping, drop_out_at=drop)
        runs.add(f"resumed {drop}", stopping, root=f"dropped {drop}")
    runs.add("bf16", replace(evaluated(data_uri), engine=EngineConfig(strategy="zero1", precision="bf16")))
    runs.launch(2)
    for world_size in (1, 3):
        runs.add(f"of {world_size}", evaluated(data_uri))
        runs.add(f"few of {world_size}", evaluated(data_uri, max_samples=2))
        runs.launch(world_size)
    return runs


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_is_evaluated_trains_bit_by_bit_as_one_that_is_not(text: Runs, strategy: Strategy) -> None:
    assert text.found[strategy].losses == text.found[f"{strategy} alone"].losses
    assert not text.found[f"{strategy} alone"].scores


@pytest.mark.parametrize("name", [*STRATEGIES, "of 1", "of 3"])
def test_scores_depend_neither_on_the_strategy_nor_on_the_world_size(text: Runs, name: str) -> None:
    reference, scores = text.found["of 1"].scores, text.found[name].scores
    assert list(scores) == [6, 12]
    for step, expected in reference.items():
        assert scores[step].targets == expected.targets
        assert scores[step].loss == pytest.approx(expected.loss, abs=LOSS_TOLERANCE)
        # A near tie may fall to either side: two targets of all.
        assert scores[step].accuracy == pytest.approx(expected.accuracy, abs=2 / expected.targets)
    assert reference[12].loss < reference[6].loss - 0.1, "the run must learn, or equal scores mean little"


def test_ranks_without_samples_of_their_own_take_part(text: Runs) -> None:
    # Two samples fit one batch: two of three ranks have none.
    expected, found = text.found["few of 1"].scores[12], text.found["few of 3"].scores[12]
    assert found.targets == expected.targets
    assert found.loss == pytest.approx(expected.loss, abs=LOSS_TOLERANCE)


def test_bf16_is_scored_near_fp32(text: Runs) -> None:
    # As test_training's band for the losses of a step.
    assert text.found["bf16"].scores[12].loss == pytest.approx(text.found["of 1"].scores[12].loss, abs=0.03)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_best_step_is_exported_and_scores_as_it_did_in_training(
    text: Runs, tmp_path: Path, strategy: Strategy
) -> None:
    best = text.found[strategy].scores[6]
    assert [one.best for one in text.found[strategy].scores.values()] == [True, False]
    export = text.export(strategy)
    assert (export.step, export.tokens_seen) == (6, 6 * 12 * 32)
    assert export.checkpoint_uri == f"{text.uri(strategy)}/step-00000006"
    assert text.saved(strategy) == [6, 8, 12], (
        "an improving step is saved, whatever the interval; the three newest are kept"
    )

    arguments = [f"--data={text.uri('dataset')}", f"--model={text.uri(strategy)}-model"]
    assert main([*arguments, f"--output={tmp_path / 'report.json'}"]) == 0
    [score] = json.loads((tmp_path / "report.json").read_text())["models"]
    assert score["tokens"] == best.targets
    # Other batches: fp32 sums in another order.
    assert score["loss"] == pytest.approx(best.loss, rel=1e-6)


def test_patience_ends_the_run_as_done_and_a_restart_trains_no_further(text: Runs) -> None:
    stopped = text.found["stopped"]
    assert list(stopped.losses) == list(range(1, 9))
    assert [(step, one.best) for step, one in stopped.scores.items()] == [
        (2, True),
        (4, False),
        (6, False),
        (8, False),
    ]
    last = text.manifest("stopped", 8)
    assert last.best == Best(step=2, value=stopped.scores[2].loss)
    assert last.stale_evaluations == 3
    assert text.found["stopped again"] == Trained()
    assert text.export("stopped").step == 8
    # Written by the restart: it exported again.
    assert text.export("stopped").attempt != last.attempt


@pytest.mark.parametrize("drop", DROPS)
def test_a_run_that_is_cut_off_decides_as_the_uninterrupted_one(text: Runs, drop: int) -> None:
    whole, before, after = (text.found[name] for name in ("stopped", f"dropped {drop}", f"resumed {drop}"))
    assert before.losses | after.losses == whole.losses
    assert before.decisions | after.decisions == whole.decisions
    resumed_at = max((step for step in (2, 4, 8) if step <= drop), default=0)
    assert min(after.losses, default=9) == resumed_at + 1
    assert text.manifest(f"dropped {drop}", 8).best == text.manifest("stopped", 8).best
    assert text.export(f"dropped {drop}").step == 8

    # The export tells of each evaluation once.
    lines = FileStorage().read(f"{text.uri(f'dropped {drop}')}-model/metrics.jsonl")
    events = [one for one in measurements_from_jsonl(lines) if isinstance(one, EvaluationEvent)]
    assert [one.step for one in events] == [2, 4, 6, 8]


# Digits

DIGITS_STEPS = 80


def digits_config(**more: Any) -> JobConfig:
    config = JobConfig(
        model=ModelConfig(source="penstock_trainer.model.digits:digits_classifier", options={"channels": 16}),
        data=DataConfig(source="penstock_trainer.model.digits:digits"),
        optim=OptimConfig(learning_rate=3e-3, warmup_steps=5),
        engine=EngineConfig(strategy="fsdp-full", timeout_seconds=60),
        checkpoint=CheckpointConfig(interval=25),
        evaluation=EvaluationConfig(interval=20, max_samples=0, metric="accuracy"),
        steps=DIGITS_STEPS,
        global_batch=48,
        max_micro_batch=24,
        log_interval=1,
    )
    return replace(config, **more)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("digits"))
    runs.add("dropped", digits_config(), drop_out_at=30)
    runs.add("resumed", digits_config(), root="dropped")
    for strategy in STRATEGIES:
        engine = EngineConfig(strategy=strategy, precision="bf16", timeout_seconds=60)
        runs.add(f"{strategy} bf16", digits_config(engine=engine, steps=6))
    runs.add("whole", digits_config())
    trial = {"CLOUD_ML_TRIAL_ID": "5", "CLOUD_ML_HP_METRIC_FILE": str(runs.directory / "trial/metrics")}
    runs.launch(2, trial)
    for world_size in (1, 3):
        runs.add(f"of {world_size}", digits_config())
        runs.launch(world_size)
    return runs


def test_digits_are_learned(digits: Runs) -> None:
    scores = digits.found["whole"].scores
    assert list(scores) == [20, 40, 60, 80]
    assert scores[80].targets == 359
    assert scores[80].accuracy > 0.9


def test_digits_that_were_cut_off_are_learned_bit_by_bit_as_if_not(digits: Runs) -> None:
    whole, before, after = (digits.found[name] for name in ("whole", "dropped", "resumed"))
    # Saved as the best at step 20, and at step 25.
    assert (max(before.losses), min(after.losses)) == (30, 26)
    assert before.losses | after.losses == whole.losses
    assert before.decisions | after.decisions == whole.decisions


@pytest.mark.parametrize("world_size", [1, 3])
def test_any_number_of_ranks_learns_digits_alike(digits: Runs, world_size: int) -> None:
    # At a rate of 5e-3 a maximum of the pooling falls to another pixel on one of them, which moves losses by 4e-5.
    expected, found = digits.found["whole"], digits.found[f"of {world_size}"]
    assert found.losses == pytest.approx(expected.losses, abs=LOSS_TOLERANCE)
    for step, scores in expected.scores.items():
        assert found.scores[step].loss == pytest.approx(scores.loss, abs=LOSS_TOLERANCE)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_images_are_cast_to_bf16_with_the_model(digits: Runs, strategy: Strategy) -> None:
    # 8 bits of mantissa of a loss near 2.3. All of it is in the warm-up, where the rate is that of the longer run.
    losses = digits.found[f"{strategy} bf16"].losses
    assert losses == pytest.approx({step: digits.found["whole"].losses[step] for step in losses}, abs=0.03)
    assert list(digits.found[f"{strategy} bf16"].scores) == [6]


def test_the_exported_classifier_is_the_one_that_was_scored(digits: Runs) -> None:
    import torch

    from penstock_trainer.model.digits import digits as load_digits

    export = read_export(f"{digits.uri('whole')}-model")
    held_out = load_digits("evaluation")
    images = torch.stack([held_out[index]["image"] for index in range(len(held_out))])
    labels = torch.stack([held_out[index]["labels"] for index in range(len(held_out))])
    with torch.no_grad():
        right = int((export.model.eval()(images).argmax(-1) == labels).sum())
    assert right / len(labels) == pytest.approx(digits.found["whole"].scores[80].accuracy)
    assert export.text is None


def test_a_classifier_is_not_scored_on_text(digits: Runs) -> None:
    with pytest.raises(
        ExportError, match=r"has no tokenizer.*data\.source = 'penstock.*evaluation\.interval"
    ):
        score_model(f"{digits.uri('whole')}-model", ["text"], num_bytes=4, batch=1)


def test_the_trial_reports_the_metric_of_each_evaluation_once(digits: Runs) -> None:
    lines = [json.loads(line) for line in (digits.directory / "trial/metrics").read_text().splitlines()]
    scores = digits.found["whole"].scores  # the last scenario: each process of a trial begins its file anew
    assert [(line["trial"], line["global_step"], line["accuracy"]) for line in lines] == [
        ("5", str(step), str(one.accuracy)) for step, one in scores.items()
    ]
