"""AdamW and SGD, their learning rate over time, and their state: alike for every engine."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from penstock_trainer.contract.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, steps: int, *, global_batch: int) -> float:
    """Of the step after `step` steps are done, in a run of `steps` steps of `global_batch` sequences.

    Linear warm-up reaches the peak with step number `warmup_steps`; the decay reaches min_lr_ratio of it with the
    last step. A pure function of its arguments, so it needs no state in a checkpoint. JobConfig has checked that
    warm-up and decay fit into `steps`.
    """
    peak = config.learning_rate * _batch_scale(config, global_batch)
    done = step + 1
    if done <= config.warmup_steps:
        return peak * done / config.warmup_steps
    return peak * _decay(config, done, steps)


def _batch_scale(config: OptimConfig, global_batch: int) -> float:
    """Factor of the peak: see OptimConfig.lr_scaling for the sources of the two rules."""
    if config.lr_scaling == "none":
        return 1.0
    ratio = global_batch / config.lr_reference_batch
    return ratio if config.lr_scaling == "linear" else math.sqrt(ratio)


def _decay(config: OptimConfig, done: int, steps: int) -> float:
    """Share of the peak in step number `done` (from 1), past warm-up: 1 at the most, min_lr_ratio at the end.

    Cosine: Loshchilov and Hutter, 2017, without restarts. WSD: Hu et al., 2024 (MiniCPM), with a linear decay.
    """
    start = steps - config.decay_steps if config.schedule == "wsd" else config.warmup_steps
    if config.schedule == "constant" or done <= start:
        return 1.0
    progress = (done - start) / (steps - start)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW or SGD over the parameters that require a gradient; weight decay for tensors of two or more dims.

    AdamW is fused. SGD is the multi-tensor form: torch has no DTensor rule for fused SGD (aten._fused_sgd_, torch
    2.13), and one form under every engine keeps their steps bitwise alike. The learning rate is set before each step.
    Raises ValueError when no parameter requires a gradient.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ValueError(
            "no parameter requires a gradient: there is nothing to train. Leave requires_grad on for at least one."
        )
    matrices = [parameter for parameter in trained if _num_dims(parameter) >= 2]
    others = [parameter for parameter in trained if _num_dims(parameter) < 2]
    groups = [
        {"params": members, "weight_decay": weight_decay}
        for members, weight_decay in ((matrices, config.weight_decay), (others, 0.0))
        if members  # DeepSpeed drops an empty group and torch keeps it
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, foreach=True)
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def _num_dims(parameter: nn.Parameter) -> int:
    """Dims of the whole parameter. Under deepspeed.zero.Init a rank holds a flat part, and ds_shape has the whole."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


def step_if_finite(optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> None:
    """One step, or none when the norm is not finite. Does not wait for an accelerator where AdamW is fused."""
    is_finite = torch.isfinite(grad_norm)
    if grad_norm.device.type != "cpu" and isinstance(optimizer, torch.optim.AdamW):
        step_on_device(optimizer, is_finite)
    elif is_finite:
        optimizer.step()


def step_on_device(optimizer: torch.optim.AdamW, may_step: Tensor) -> None:
    """One step of fused AdamW, or none: its kernel decides, by the flag that torch.amp.GradScaler gives it."""
    optimizer.found_inf = (~may_step).float()  # type: ignore[attr-defined]  # not declared
    optimizer.step()


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """For the next step of every group."""
    for group in optimizer.param_groups:
        group["lr"] = value


def state_keys(config: OptimConfig) -> tuple[str, ...]:
    """The state tensors of a parameter's own shape. Beside them AdamW counts `step`, a scalar; SGD counts nothing."""
    if config.name == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.momentum else ()


def materialize_state(optimizer: torch.optim.Optimizer, config: OptimConfig) -> None:
    """Create the state that the first step would create, so that a checkpoint can be loaded into it.

    The steps that follow are the same as without: AdamW starts from zeros; SGD's first step copies the gradient where
    a buffer of zeros gives momentum * 0 + gradient. State that exists is replaced.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = {key: torch.zeros_like(parameter, requires_grad=False) for key in state_keys(config)}
            if config.name == "adamw":
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            if state:
                optimizer.state[parameter] = state
