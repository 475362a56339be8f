"""The seam between the trainer and the ways to spread a model over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from penstock_trainer.contract.config import JobConfig
from penstock_trainer.data.batch_plan import BatchPlan
from penstock_trainer.model.objective import Batch, Objective
from penstock_trainer.observe.clock import Clock
from penstock_trainer.world import World

State = dict[str, Any]
"""`{"model": {fqn: tensor}, "opt": {"state": {fqn: {"step", "exp_avg", "exp_avg_sq"}}}}`; SGD has `momentum_buffer` in
place of the three, and fp16 adds `{"loss_scale": {"scale", "good_steps"}}`. `model` has persistent buffers too. Tensors
are the live ones, whole or as the part that this rank holds; torch.distributed.checkpoint reads and fills them in place.
Frozen parameters and buffers have no optimizer state."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step leaves to log. Tensors may still be on their way through the device."""

    loss: Tensor
    """This rank's share: the sum over ranks is the mean over the step's targets."""
    grad_norm: Tensor | float
    """Of all gradients of all ranks, before clipping; inf or NaN when the step was left out."""


class Engine(Protocol):
    """One strategy. Every method is collective: all ranks call it, in the same order."""

    def train_step(self, batches: Sequence[Batch], *, num_targets: int, learning_rate: float) -> StepResult:
        """One optimizer step on this rank's micro-batches, as many as the plan's accumulation.

        One call rather than forward, backward and step, because engines differ in when they reduce gradients: the
        accumulation loop is theirs. The gradient is that of the mean over the `num_targets` targets of all ranks,
        clipped by its true norm. A step whose gradient is not finite is left out: weights and optimizer state stay as
        they were. In fp16 it lowers the loss scale too.
        """

    def evaluate(self, batch: Batch) -> Tensor:
        """Objective in eval mode on this rank's batch: [2], the targets' summed loss and how many were predicted.

        No gradients, no dropout; the next train_step is as if it had not been called.
        """

    def state(self) -> State:
        """The canonical state. The same layout from every engine, so that any can continue any other's run."""

    def state_loaded(self) -> None:
        """To be called after `state()` was filled from a checkpoint: what was derived from it is derived anew."""

    def weights(self) -> dict[str, Tensor]:
        """All weights in fp32, and persistent buffers, on CPU on rank 0, for export; empty on the other ranks.

        Not part of `state`, which no rank needs to be able to hold whole.
        """


class EngineFactory(Protocol):
    """How an engine's class is called."""

    def __call__(
        self, objective: Objective, config: JobConfig, batch: BatchPlan, world: World, clock: Clock
    ) -> Engine:
        """Spread an initialized model, which lies on CPU in fp32, over the ranks.

        The engine marks `forward`, `backward` and `optimizer` of its steps on the clock; clipping is the optimizer's.
        """
