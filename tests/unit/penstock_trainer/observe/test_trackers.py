"""Where a run's curves are shown, and where not."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import wandb

from penstock_trainer.contract.config import JobConfig, ObserveConfig
from penstock_trainer.contract.events import EvaluationEvent, StepEvent
from penstock_trainer.observe.tensorboard import TensorBoard
from penstock_trainer.observe.tracker import Trackers, open_trackers
from penstock_trainer.observe.wandb_run import run_id
from penstock_trainer.rank_env import RankEnv

CONFIG = JobConfig(observe=ObserveConfig(wandb_project="rivers"))
STEP = StepEvent(step=1, steps=2, loss=0.5, learning_rate=0.1, grad_norm=1.0, tokens_per_second=1.0)
EVALUATION = EvaluationEvent(step=1, loss=0.75, accuracy=0.5, targets=4, best=True, seconds=1.0)


@pytest.mark.parametrize(
    ("environ", "mode"),
    [
        ({}, None),
        ({"WANDB_API_KEY": "k"}, "online"),
        ({"WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_MODE": "offline", "WANDB_API_KEY": "k"}, "offline"),
        ({"WANDB_MODE": "disabled", "WANDB_API_KEY": "k"}, None),
        ({"WANDB_MODE": "online"}, None),
    ],
)
def test_weights_and_biases_needs_a_key_or_to_be_offline(environ: dict[str, str], mode: str | None) -> None:
    assert RankEnv.from_environ(environ).wandb_mode == mode


def test_an_offline_run_is_the_same_run_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where wandb keeps offline runs
    monkeypatch.setenv("WANDB_SILENT", "true")
    env = replace(RankEnv(), wandb_mode="offline")
    for _attempt in range(2):
        trackers = open_trackers(CONFIG, env, root_uri="gs://b/run")
        trackers.step(STEP)
        trackers.evaluation(EVALUATION)
        trackers.close()
    wandb.teardown()  # as at the end of the process: the service of wandb writes what it has
    kept = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert {path.name for path in kept} == {f"run-{run_id('gs://b/run', CONFIG)}.wandb"}
    for path in kept:
        content = path.read_bytes()
        for told in (b"rivers", b"train/loss", b"evaluation/accuracy", b"max_micro_batch", b"gs://b/run"):
            assert told in content


def test_a_run_elsewhere_or_of_another_config_is_another_one() -> None:
    other = replace(CONFIG, seed=1)
    ids = {run_id(uri, config) for uri in ("gs://b/1", "gs://b/2") for config in (CONFIG, other)}
    assert len(ids) == 4


def test_without_a_key_it_says_that_nothing_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    open_trackers(CONFIG, RankEnv(), root_uri="gs://b/run").step(STEP)
    assert (
        "nothing goes to Weights & Biases: neither WANDB_API_KEY nor WANDB_MODE=offline is set" in caplog.text
    )


def test_only_rank_0_shows_anything(tmp_path: Path) -> None:
    env = RankEnv(tensorboard_dir=tmp_path.as_uri(), rank=1, world_size=2, wandb_mode="offline")
    trackers = open_trackers(CONFIG, env, root_uri="gs://b/run")
    trackers.step(STEP)
    trackers.close()
    assert not list(tmp_path.iterdir())


def test_tensorboard_can_be_left_out(tmp_path: Path) -> None:
    config = JobConfig(observe=ObserveConfig(tensorboard=False))
    trackers = open_trackers(config, RankEnv(tensorboard_dir=tmp_path.as_uri()), root_uri="gs://b/run")
    trackers.step(STEP)
    trackers.close()
    assert not list(tmp_path.iterdir())


def test_a_tracker_that_fails_takes_nothing_from_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    trackers = Trackers(
        [TensorBoard((tmp_path / "file").as_uri()), TensorBoard((tmp_path / "runs").as_uri())]
    )
    trackers.step(STEP)
    trackers.upload()
    assert "TensorBoard failed; the run goes on" in caplog.text
    assert len(list((tmp_path / "runs").iterdir())) == 1
