"""The schedules' values, what the optimizers are made of, and what their steps do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from distributed.tiny_run import tiny_config
from penstock_trainer.contract.config import OptimConfig
from penstock_trainer.model.decoder import Decoder
from penstock_trainer.optim import (
    build_optimizer,
    learning_rate,
    materialize_state,
    set_learning_rate,
    state_keys,
    step_if_finite,
    step_on_device,
)

CONFIGS = [
    OptimConfig(),
    OptimConfig(name="sgd", learning_rate=0.1),
    OptimConfig(name="sgd", learning_rate=0.1, momentum=0.0),
]
NAMES = ["adamw", "sgd", "sgd without momentum"]


def rates(config: OptimConfig, steps: int) -> list[float]:
    return [learning_rate(config, step, steps, global_batch=16) for step in range(steps)]


def rates_of_torch(
    config: OptimConfig, steps: int, make: Callable[..., object], **options: float
) -> list[float]:
    """What one of torch's schedulers gives for `steps` steps, with its value of the step before left out."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    scheduler = make(optimizer, **options)
    seen = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()  # type: ignore[attr-defined]  # LRScheduler
        seen.append(optimizer.param_groups[0]["lr"])
    return seen


def test_the_rate_rises_linearly_and_falls_along_a_cosine() -> None:
    config = OptimConfig(learning_rate=1.0, min_lr_ratio=0.1, warmup_steps=4)
    seen = rates(config, 12)
    assert seen[:4] == [0.25, 0.5, 0.75, 1.0]
    assert seen[7] == pytest.approx(0.55)  # half-way down: the mean of peak and minimum
    assert seen[11] == pytest.approx(0.1)
    assert seen[4:] == sorted(seen[4:], reverse=True)


# Both sides are closed forms in float64; torch's recurrences lose a few units in the last place per step.
CLOSE = 1e-12


def test_cosine_is_that_of_torch() -> None:
    config = OptimConfig(learning_rate=0.3, min_lr_ratio=0.1, warmup_steps=0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR
    assert rates(config, 10) == pytest.approx(
        rates_of_torch(config, 10, cosine, T_max=10, eta_min=0.03), rel=CLOSE
    )


def test_linear_is_that_of_torch() -> None:
    config = OptimConfig(learning_rate=0.3, schedule="linear", min_lr_ratio=0.1, warmup_steps=0)
    linear = torch.optim.lr_scheduler.LinearLR
    expected = rates_of_torch(config, 10, linear, start_factor=1.0, end_factor=0.1, total_iters=10)
    assert rates(config, 10) == pytest.approx(expected, rel=CLOSE)


def test_warm_up_is_that_of_torch_which_starts_a_step_earlier() -> None:
    config = OptimConfig(learning_rate=0.3, schedule="constant", warmup_steps=5)
    linear = torch.optim.lr_scheduler.LinearLR  # its start_factor must be more than 0
    expected = rates_of_torch(config, 8, linear, start_factor=1e-15, end_factor=1.0, total_iters=5)
    assert rates(config, 8) == pytest.approx(expected, rel=CLOSE)


def test_wsd_warms_up_stays_and_falls_linearly_over_its_decay_steps() -> None:
    config = OptimConfig(learning_rate=1.0, schedule="wsd", min_lr_ratio=0.2, warmup_steps=2, decay_steps=4)
    assert rates(config, 10) == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2], rel=CLOSE)


def test_wsd_may_leave_no_stable_part() -> None:
    config = OptimConfig(learning_rate=1.0, schedule="wsd", min_lr_ratio=0.0, warmup_steps=2, decay_steps=2)
    assert rates(config, 4) == [0.5, 1.0, 0.5, 0.0]


def test_constant_stays_at_the_peak_and_has_no_minimum() -> None:
    config = OptimConfig(learning_rate=2.0, schedule="constant", min_lr_ratio=0.0, warmup_steps=1)
    assert rates(config, 4) == [2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_the_last_step_has_the_minimum(schedule: str, warmup_steps: int) -> None:
    config = OptimConfig(
        learning_rate=0.5,
        schedule=schedule,  # type: ignore[arg-type]  # one of the literals
        min_lr_ratio=0.1,
        warmup_steps=warmup_steps,
        decay_steps=2 if schedule == "wsd" else 0,
    )
    assert rates(config, 7)[-1] == pytest.approx(0.05, rel=CLOSE)


def test_without_warm_up_the_first_step_is_on_the_cosine() -> None:
    config = OptimConfig(learning_rate=1.0, min_lr_ratio=0.0, warmup_steps=0)
    assert rates(config, 2) == pytest.approx([0.5, 0.0])


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_peak_grows_with_the_batch_as_told(scaling: str, factor: float) -> None:
    config = OptimConfig(
        learning_rate=0.1,
        lr_scaling=scaling,  # type: ignore[arg-type]  # one of the literals
        lr_reference_batch=0 if scaling == "none" else 64,
        warmup_steps=2,
    )
    warm = [learning_rate(config, step, 10, global_batch=256) for step in range(2)]
    assert warm == pytest.approx([0.05 * factor, 0.1 * factor], rel=CLOSE)


@pytest.mark.parametrize("scaling", ["linear", "sqrt"])
def test_at_the_reference_batch_scaling_changes_nothing(scaling: str) -> None:
    config = OptimConfig(lr_scaling=scaling, lr_reference_batch=32)  # type: ignore[arg-type]
    assert learning_rate(config, 30, 99, global_batch=32) == learning_rate(
        OptimConfig(), 30, 99, global_batch=8
    )


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_weight_decay_is_for_matrices_only(config: OptimConfig) -> None:
    model = Decoder(tiny_config("").model, 50)
    decayed, kept = build_optimizer(model.parameters(), config).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert {parameter.ndim for parameter in decayed["params"]} == {2}
    assert {parameter.ndim for parameter in kept["params"]} == {1}
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_weight_decay_sees_the_whole_shape_of_a_parameter_that_zero_init_has_split() -> None:
    split = nn.Parameter(torch.zeros(6))
    split.ds_shape = torch.Size((3, 4))  # type: ignore[attr-defined]  # set by deepspeed.zero.Init
    (group,) = build_optimizer([split], OptimConfig(weight_decay=0.1)).param_groups
    assert group["weight_decay"] == 0.1


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_a_frozen_parameter_is_left_out_and_no_group_is_empty(config: OptimConfig) -> None:
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    trained = nn.Parameter(torch.zeros(2, 2))
    optimizer = build_optimizer([frozen, trained], config)
    assert [group["params"] for group in optimizer.param_groups] == [[trained]]


def test_a_model_that_is_frozen_throughout_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        build_optimizer([nn.Parameter(torch.zeros(3), requires_grad=False)], OptimConfig())


def stepped(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], rate: Callable[[int], float]
) -> list[Tensor]:
    """A matrix and a vector after five steps with given gradients."""
    generator = torch.Generator().manual_seed(7)
    parameters = [nn.Parameter(torch.randn(5, 4, generator=generator)), nn.Parameter(torch.ones(4))]
    optimizer = make(parameters)
    for step in range(5):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        set_learning_rate(optimizer, rate(step))
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def plain(config: OptimConfig) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """The same optimizer in torch's form with one loop step per tensor."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [
            {"params": parameters[:1], "weight_decay": config.weight_decay},
            {"params": parameters[1:], "weight_decay": 0.0},
        ]
        if config.name == "sgd":
            return torch.optim.SGD(groups, lr=1.0, momentum=config.momentum, foreach=False)
        betas = (config.beta1, config.beta2)
        return torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=config.eps, foreach=False)

    return make


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_steps_are_those_of_the_plain_form(config: OptimConfig) -> None:
    ours = stepped(lambda parameters: build_optimizer(parameters, config), lambda step: 0.1 / (step + 1))
    torchs = stepped(plain(config), lambda step: 0.1 / (step + 1))
    for our, torchs_own in zip(ours, torchs, strict=True):
        # The fused kernel groups AdamW's operations in another way: a few units in the last place of fp32.
        torch.testing.assert_close(our, torchs_own, rtol=1e-5, atol=1e-6)


def test_decay_of_sgd_is_l2_and_that_of_adamw_is_decoupled() -> None:
    def first_step(config: OptimConfig, gradient: float) -> float:
        weight = nn.Parameter(torch.ones(1, 1))
        weight.grad = torch.full_like(weight, gradient)
        optimizer = build_optimizer([weight], config)
        set_learning_rate(optimizer, 0.5)
        optimizer.step()
        return weight.item()

    sgd = OptimConfig(name="sgd", weight_decay=0.1)
    assert first_step(sgd, 2.0) == pytest.approx(1 - 0.5 * (2.0 + 0.1 * 1))
    # AdamW's first step is lr * sign(gradient), whatever its size: decay by lr * weight_decay is apart from it.
    assert first_step(OptimConfig(weight_decay=0.1), 2.0) == pytest.approx(1 - 0.5 * 0.1 - 0.5)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_materialized_state_steps_bit_by_bit_as_state_that_the_first_step_makes(config: OptimConfig) -> None:
    def materialized(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = build_optimizer(parameters, config)
        materialize_state(optimizer, config)
        return optimizer

    ours = stepped(materialized, lambda _: 0.1)
    torchs = stepped(lambda parameters: build_optimizer(parameters, config), lambda _: 0.1)
    assert all(torch.equal(our, torchs_own) for our, torchs_own in zip(ours, torchs, strict=True))


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_materialized_state_has_the_keys_shapes_and_types_of_the_first_steps(config: OptimConfig) -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    optimizer = build_optimizer([weight], config)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    # torch's SGD keeps {"momentum_buffer": None} without momentum: nothing to save.
    expected = {
        key: (value.shape, value.dtype)
        for key, value in optimizer.state[weight].items()
        if isinstance(value, Tensor)
    }
    materialize_state(optimizer, config)
    made = {
        key: (value.shape, value.dtype) for key, value in optimizer.state[weight].items() if value is not None
    }
    assert made == expected
    assert set(state_keys(config)) == set(made) - {"step"}


def test_state_that_was_saved_in_the_middle_continues_bit_by_bit() -> None:
    config = OptimConfig(name="sgd", learning_rate=0.1)

    def run(weight: nn.Parameter, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            weight.grad = torch.full_like(weight, math.sin(step + 1))
            optimizer.step()

    whole = nn.Parameter(torch.ones(2, 2))
    optimizer = build_optimizer([whole], config)
    run(whole, optimizer, range(3))
    resumed = nn.Parameter(whole.detach().clone())
    saved = {key: optimizer.state[whole][key].clone() for key in state_keys(config)}
    run(whole, optimizer, range(3, 6))

    again = build_optimizer([resumed], config)
    materialize_state(again, config)
    for key in state_keys(config):
        again.state[resumed][key].copy_(saved[key])
    run(resumed, again, range(3, 6))
    assert torch.equal(resumed, whole)


@pytest.fixture
def lone_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_dtensors_of_fsdp_step_bit_by_bit_as_plain_tensors(config: OptimConfig) -> None:
    def trained(*, sharded: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Linear(4, 3)
        if sharded:
            fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        optimizer = build_optimizer(model.parameters(), config)
        materialize_state(optimizer, config)
        for step in range(3):
            model(torch.full((2, 4), 0.5 + step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]

    for shard, whole in zip(trained(sharded=True), trained(sharded=False), strict=True):
        assert torch.equal(shard, whole)


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize("sharded", [False, True])
def test_the_flag_of_the_device_decides_on_a_step_as_the_host_does(sharded: bool) -> None:
    def trained(step: Callable[[torch.optim.AdamW, Tensor], None]) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Linear(4, 3)
        if sharded:
            fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        optimizer = build_optimizer(model.parameters(), OptimConfig())
        assert isinstance(optimizer, torch.optim.AdamW)
        materialize_state(optimizer, OptimConfig())
        for norm in (1.0, math.nan, 2.0):
            model(torch.full((2, 4), norm)).square().sum().backward()
            step(optimizer, torch.tensor(norm))
            optimizer.zero_grad()
        return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]

    on_device = trained(lambda optimizer, norm: step_on_device(optimizer, torch.isfinite(norm)))
    on_host = trained(step_if_finite)
    for one, other in zip(on_device, on_host, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)
