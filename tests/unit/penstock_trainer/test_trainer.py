"""A whole run in one process: what ends it, and what it leaves behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import tiny_config
from penstock_trainer.contract.config import OptimConfig
from penstock_trainer.errors import DivergedError
from penstock_trainer.preemption import Preemption
from penstock_trainer.rank_env import RankEnv
from penstock_trainer.trainer import Trainer
from penstock_trainer.world import World


def test_a_state_that_diverged_between_two_log_lines_is_not_saved(tmp_path: Path) -> None:
    config = tiny_config(
        build_dataset(tmp_path / "dataset"),
        (tmp_path / "root").as_uri(),
        optim=OptimConfig(learning_rate=1e30, warmup_steps=3),
        log_interval=100,
    )
    with World.join(RankEnv(omp_num_threads=1), timeout_seconds=30) as world:
        trainer = Trainer(config, world, Preemption())
        with pytest.raises(DivergedError, match=r"gradient's norm nan"):
            trainer.fit()
    assert not list((tmp_path / "root").rglob("manifest.json"))


def test_a_step_is_saved_whether_or_not_it_is_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(build_dataset(tmp_path / "dataset"), (tmp_path / "root").as_uri(), log_interval=5)
    config = replace(config, steps=8)
    with World.join(RankEnv(omp_num_threads=1), timeout_seconds=30) as world:
        assert Trainer(config, world, Preemption()).fit() == "done"
    assert len(list((tmp_path / "root").rglob("manifest.json"))) == 2  # of steps 4 and 8
    assert capsys.readouterr().out.count('"event": "step"') == 3  # 1, 5 and 8
