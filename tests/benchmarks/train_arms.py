"""The training loops that are compared: ours, plain torch, and the frameworks that people would use instead.

Alike in all: batches of the same tokens in the same order, fused AdamW at one learning rate, clipping at norm 1, a log
line with the loss every `log_interval` steps, nothing saved before the last step is done.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness import Arm, StepDone
from penstock_trainer.contract.config import (
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    JobConfig,
    ModelConfig,
    OptimConfig,
    Precision,
    Strategy,
)
from penstock_trainer.data.shards import read_manifest
from penstock_trainer.data.token_windows import TokenWindows
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.model.hugging_face import hf_config
from penstock_trainer.preemption import Preemption
from penstock_trainer.storage import join, path_of
from penstock_trainer.trainer import Trainer
from penstock_trainer.world import World

LEARNING_RATE = 1e-3
CLIP_NORM = 1.0
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all arms train, and how."""

    model: ModelConfig
    vocab_size: int
    seq_len: int
    batch: int
    """Sequences of a step."""
    steps: int
    log_interval: int
    data_uri: str
    directory: Path
    """For what arms write."""
    device: torch.device
    precision: Precision = "fp32"
    compile: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Targets of a step."""
        return self.batch * self.seq_len

    def windows(self) -> Tensor:
        """All sequences of the run in our order, [steps * batch, seq_len + 1], on CPU: read before the run begins."""
        manifest = read_manifest(self.data_uri)
        shards = [
            np.fromfile(path_of(join(self.data_uri, shard.name)), dtype=manifest.token_type)
            for shard in manifest.train
        ]
        split = TokenWindows(shards, seq_len=self.seq_len, seed=JobConfig().seed)
        return split.samples(0, self.steps * self.batch)

    def autocast(self) -> torch.autocast:
        """As HF Trainer's bf16 and our ddp have it; off in fp32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")


class _AtBoundary(Preemption):
    """Our loop asks once, at the beginning of every step."""

    def __init__(self, step_done: StepDone) -> None:
        super().__init__()
        self._step_done = step_done

    @property
    def is_told(self) -> bool:
        """See Preemption.is_told."""
        self._step_done()
        return super().is_told


def ours(setting: Setting, world: World, strategy: Strategy) -> Arm:
    """Trainer.fit as a job runs it, with its guard, metrics and prefetch."""
    name = f"ours {strategy}"
    config = JobConfig(
        model=setting.model,
        data=DataConfig(uri=setting.data_uri, seq_len=setting.seq_len),
        optim=OptimConfig(
            learning_rate=LEARNING_RATE,
            warmup_steps=0,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            clip_norm=CLIP_NORM,
        ),
        engine=EngineConfig(strategy=strategy, precision=setting.precision, compile=setting.compile),
        checkpoint=CheckpointConfig(
            uri=(setting.directory / f"{strategy}-checkpoints").as_uri(), interval=setting.steps
        ),
        steps=setting.steps,
        global_batch=setting.batch,
        max_micro_batch=setting.batch,
        log_interval=setting.log_interval,
    )

    def fit(step_done: StepDone) -> None:
        alone = replace(world, env=replace(world.env, model_dir=""))
        Trainer(config, alone, _AtBoundary(step_done)).fit()

    return Arm(name, fit)


def bare(setting: Setting) -> Arm:
    """The shortest loop of plain torch that does the same; its batches lie ready."""

    def fit(step_done: StepDone) -> None:
        decoder = _decoder(setting)
        model = torch.compile(decoder) if setting.compile else decoder
        optimizer = _adamw(decoder)
        batches = list(setting.windows().to(setting.device).split(setting.batch))
        for step, tokens in enumerate(batches, start=1):
            step_done()
            with setting.autocast():
                logits = model(tokens[:, :-1])
                loss = cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            # torch's default on CPU is a loop over the gradients, which is 2 % of a short step slower.
            clip_grad_norm_(decoder.parameters(), CLIP_NORM, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            if step % setting.log_interval == 0:
                sys.stdout.write(f"step {step} loss {loss.item():.4f}\n")

    return Arm("bare loop", fit)


class WithLoss(nn.Module):
    """Our decoder as frameworks want a model: the loss comes out of it."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Mean over `labels` [B, T], the tokens that come next."""
        logits = self.decoder(input_ids)
        return {"loss": cross_entropy(logits.flatten(0, 1).float(), labels.flatten())}


class Windows(Dataset[Batch]):
    """All sequences of the run."""

    def __init__(self, windows_NT: Tensor, *, shifts_labels: bool) -> None:
        """`shifts_labels`: the model takes the labels where the inputs are, and shifts them itself."""
        self._windows_NT = windows_NT
        self._labels = slice(0, -1) if shifts_labels else slice(1, None)

    def __len__(self) -> int:
        return len(self._windows_NT)

    def __getitem__(self, index: int) -> Batch:
        window = self._windows_NT[index]
        return {"input_ids": window[:-1], "labels": window[self._labels]}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model for the frameworks, and its data."""

    name: str
    build: Callable[[Setting], nn.Module]
    shifts_labels: bool

    def dataset(self, setting: Setting) -> Windows:
        """All sequences of the run in order."""
        return Windows(setting.windows(), shifts_labels=self.shifts_labels)


def _llama(setting: Setting) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    told = hf_config(setting.model, vocab_size=setting.vocab_size, seq_len=setting.seq_len, eos_id=0)
    llama: nn.Module = LlamaForCausalLM(LlamaConfig(**told)).train()
    return llama


OUR_DECODER = Subject("our decoder", lambda setting: WithLoss(_decoder(setting).cpu()), shifts_labels=False)
LLAMA = Subject("transformers' Llama", _llama, shifts_labels=True)
"""Of the same shape."""


def hf_trainer(setting: Setting, subject: Subject) -> Arm:
    """Hugging Face's Trainer."""

    def fit(step_done: StepDone) -> None:
        from transformers import Trainer as TheirTrainer
        from transformers import TrainerCallback, TrainingArguments
        from transformers.utils.logging import set_verbosity_error

        set_verbosity_error()

        class Boundary(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                step_done()

        arguments = TrainingArguments(
            output_dir=str(setting.directory / "hf-trainer"),
            max_steps=setting.steps,
            per_device_train_batch_size=setting.batch,
            train_sampling_strategy="sequential",
            optim="adamw_torch_fused",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=WEIGHT_DECAY,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            max_grad_norm=CLIP_NORM,
            logging_steps=setting.log_interval,
            save_strategy="no",
            report_to=[],
            use_cpu=setting.device.type == "cpu",
            bf16=setting.precision == "bf16",
            torch_compile=setting.compile,
            dataloader_pin_memory=setting.device.type == "cuda",
            disable_tqdm=True,
        )
        TheirTrainer(
            model=subject.build(setting),
            args=arguments,
            train_dataset=subject.dataset(setting),
            callbacks=[Boundary()],
        ).train()

    return Arm(f"HF Trainer, {subject.name}", fit)


def accelerate(setting: Setting, subject: Subject) -> Arm:
    """The loop of accelerate's documentation. fp32."""

    def fit(step_done: StepDone) -> None:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=setting.device.type == "cpu")
        built = subject.build(setting)
        loader = DataLoader(subject.dataset(setting), batch_size=setting.batch)
        model, optimizer, batches = accelerator.prepare(built, _adamw(built), loader)
        for step, batch in enumerate(batches, start=1):
            step_done()
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            if step % setting.log_interval == 0:
                accelerator.print(f"step {step} loss {loss.item():.4f}")

    return Arm(f"accelerate, {subject.name}", fit)


def lightning(setting: Setting, subject: Subject) -> Arm:
    """Lightning's Trainer. fp32."""

    def fit(step_done: StepDone) -> None:
        from lightning.pytorch import Callback, LightningModule
        from lightning.pytorch import Trainer as TheirTrainer
        from lightning.pytorch.loggers import CSVLogger

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        class Boundary(Callback):
            def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
                step_done()

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = subject.build(setting)

            def training_step(self, batch: Batch, _index: int) -> Tensor:
                loss: Tensor = self.model(**batch)["loss"]
                self.log("loss", loss)
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return _adamw(self.model)

        trainer = TheirTrainer(
            accelerator="cpu" if setting.device.type == "cpu" else "gpu",
            devices=1,
            max_steps=setting.steps,
            gradient_clip_val=CLIP_NORM,
            log_every_n_steps=setting.log_interval,
            logger=CSVLogger(setting.directory / "lightning", name=subject.name),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Boundary()],
        )
        trainer.fit(Module(), DataLoader(subject.dataset(setting), batch_size=setting.batch))

    return Arm(f"Lightning, {subject.name}", fit)


def _decoder(setting: Setting) -> Decoder:
    decoder = Decoder(setting.model, setting.vocab_size)
    decoder.initialize(0)
    return decoder.to(setting.device)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
