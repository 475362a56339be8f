"""Losses of two ranks of ours against Hugging Face's Trainer in one process, on the same weights, data and schedule."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, get_scheduler

from distributed.tiny_dataset import build_dataset
from distributed.tiny_run import losses_by_scenario, tiny_config, windows_in_place
from penstock_trainer.contract.config import JobConfig, ModelConfig
from penstock_trainer.contract.dataset import DatasetManifest
from penstock_trainer.contract.sections.optim import Schedule
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.hugging_face import hf_config, hf_name
from penstock_trainer.testing import run_ranks

STEPS = 10
# Rounding alone: neighbours of a loss near 5 are 4.8e-7 apart in fp32 (which is what is seen), and the two sum batches
# and attention in another order, which ten steps of AdamW carry on. Decay of the norms shows as 5e-4, a learning rate
# that is one step off as 7e-2.
TOLERANCE = 5e-6
# Theirs by ours. Both of transformers' schedules count steps as ours do, see `Theirs.create_scheduler`.
SCHEDULES: dict[Schedule, tuple[str, dict[str, float]]] = {
    "cosine": ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    "linear": ("linear", {}),
}


@dataclass(frozen=True)
class Run:
    """What a training came to."""

    losses: list[float]
    """Of each step, before its update."""
    loss_after: float
    """Of the trained model, on the batch that would be next."""


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of seq_len + 1 tokens, in the order of our steps. The model shifts the labels itself."""

    def __init__(self, tokens_NT: Tensor) -> None:
        self._tokens_NT = tokens_NT

    def __len__(self) -> int:
        return len(self._tokens_NT)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens_NT[index], "labels": self._tokens_NT[index]}


class Theirs(Trainer):
    """With the learning rate of step s + 1 in step s: transformers warms up from zero, we from peak / warm-up."""

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> LRScheduler:
        given = self.optimizer if optimizer is None else optimizer
        for group in given.param_groups:
            group["initial_lr"] = group["lr"]
        kind, options = self.args.lr_scheduler_type, self.args.lr_scheduler_kwargs or {}
        warmup = self.args.get_warmup_steps(num_training_steps)
        self.lr_scheduler = get_scheduler(
            kind,
            given,
            num_warmup_steps=warmup,
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs={**options, "last_epoch": 0},
        )
        return self.lr_scheduler


@dataclass(frozen=True)
class Setting:
    """Weights and data that both sides read."""

    directory: Path

    @property
    def manifest(self) -> DatasetManifest:
        return DatasetManifest.from_json((self.directory / "dataset/manifest.json").read_text())

    @property
    def model(self) -> Path:
        return self.directory / "model"

    def config(self, schedule: Schedule) -> JobConfig:
        config = tiny_config(
            (self.directory / "dataset").as_uri(), (self.directory / f"{schedule}-checkpoints").as_uri()
        )
        optim = replace(config.optim, schedule=schedule, min_lr_ratio=0.1 if schedule == "cosine" else 0.0)
        return replace(config, model=ModelConfig(source=self.model.as_uri()), optim=optim, steps=STEPS)

    def windows(self, first: int, count: int) -> Tensor:
        """Samples of the run, [count, seq_len + 1]."""
        config = self.config("cosine")
        return windows_in_place(self.directory / "dataset", self.manifest, config).samples(first, count)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    directory = tmp_path_factory.mktemp("hf-trainer")
    build_dataset(directory / "dataset")
    setting = Setting(directory)
    write_model(setting, tiny_config("").model)
    return setting


def write_model(setting: Setting, shape: ModelConfig) -> None:
    """Our decoder's first weights as a Hugging Face directory, the norms away from 1."""
    tokenizer = setting.manifest.tokenizer
    model = Decoder(shape, tokenizer.vocab_size)
    model.initialize(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim < 2:
                weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(weight.numel()))
    setting.model.mkdir()
    save_file(
        {hf_name(name): weight.detach() for name, weight in model.named_parameters()},
        setting.model / "model.safetensors",
        metadata={"format": "pt"},
    )
    told = hf_config(shape, vocab_size=tokenizer.vocab_size, seq_len=64, eos_id=tokenizer.eos_id)
    (setting.model / "config.json").write_text(json.dumps(told))


def loss_after(setting: Setting, model: LlamaForCausalLM, config: JobConfig) -> float:
    tokens = setting.windows(STEPS * config.global_batch, config.global_batch)
    with torch.no_grad():
        return float(model.eval()(input_ids=tokens, labels=tokens).loss)


@pytest.fixture(scope="module")
def ours(setting: Setting) -> dict[str, Run]:
    """By schedule; two ranks of FSDP, two micro-batches each, in one launch."""
    scenarios: list[dict[str, Any]] = [
        {
            "name": schedule,
            "config": setting.config(schedule).to_json(),
            "model_dir": (setting.directory / f"{schedule}-export").as_uri(),
        }
        for schedule in SCHEDULES
    ]
    ranks = run_ranks("distributed.training_ranks", [json.dumps(scenarios)], world_size=2)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr[-4000:]
    found = losses_by_scenario(ranks[0].stdout)
    runs = {}
    for schedule in SCHEDULES:
        exported = LlamaForCausalLM.from_pretrained(setting.directory / f"{schedule}-export")
        after = loss_after(setting, exported, setting.config(schedule))
        runs[schedule] = Run([found[schedule][step] for step in range(1, STEPS + 1)], after)
    return runs


def theirs(setting: Setting, schedule: Schedule) -> Run:
    config = setting.config(schedule)
    kind, options = SCHEDULES[schedule]
    optim = config.optim
    arguments = TrainingArguments(
        output_dir=str(setting.directory / f"{schedule}-hf"),
        max_steps=STEPS,
        per_device_train_batch_size=config.global_batch // 2,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
        optim="adamw_torch",
        learning_rate=optim.learning_rate,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_epsilon=optim.eps,
        max_grad_norm=optim.clip_norm,
        lr_scheduler_type=kind,
        lr_scheduler_kwargs=options,
        warmup_steps=optim.warmup_steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    model = LlamaForCausalLM.from_pretrained(setting.model)
    windows = Windows(setting.windows(0, STEPS * config.global_batch))
    trainer = Theirs(model=model, args=arguments, train_dataset=windows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Run(losses, loss_after(setting, model, config))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_has_the_losses_of_hugging_faces_trainer(
    setting: Setting, ours: dict[str, Run], schedule: Schedule
) -> None:
    expected = theirs(setting, schedule)

    assert len(expected.losses) == STEPS
    assert expected.loss_after < expected.losses[0] - 0.3, "the run must learn, or equal losses mean little"
    assert ours[schedule].losses == pytest.approx(expected.losses, abs=TOLERANCE)
    # The last update is in no step's loss.
    assert ours[schedule].loss_after == pytest.approx(expected.loss_after, abs=TOLERANCE)


def test_the_two_schedules_are_told_apart(ours: dict[str, Run]) -> None:
    differences: Sequence[float] = [
        abs(one - other) for one, other in zip(ours["cosine"].losses, ours["linear"].losses, strict=True)
    ]
    assert max(differences) > 100 * TOLERANCE
