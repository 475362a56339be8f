"""The user's DeepSpeed config: every key is known, has one owner, and is refused with what to do instead."""

from __future__ import annotations

import json
from collections.abc import KeysView, Mapping
from typing import Any, get_args

import deepspeed
import pytest
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

from penstock_trainer.contract import deepspeed as contract
from penstock_trainer.contract.config import EngineConfig, JobConfig, OptimConfig, parse_args
from penstock_trainer.contract.deepspeed import bucket_elements, job_settings, merged
from penstock_trainer.contract.deepspeed_keys import DEEPSPEED_VERSION, GONE, KNOWN_KEYS, REFUSED
from penstock_trainer.contract.fields import ContractError, load_json
from penstock_trainer.contract.sections.engine import ZeroStrategy


def job(told: Mapping[str, Any], *, optim: OptimConfig | None = None, **engine: Any) -> JobConfig:
    """A job of ZeRO stage 2 unless told otherwise; 128 sequences per step, 4 at once."""
    return JobConfig(
        engine=EngineConfig(**{"strategy": "zero2", **engine}, deepspeed=told),
        optim=optim or OptimConfig(),
        global_batch=128,
        max_micro_batch=4,
    )


def refusal(told: Mapping[str, Any], **options: Any) -> str:
    with pytest.raises(ContractError) as caught:
        job(told, **options)
    return str(caught.value)


# What a user may set

TUNED: dict[str, Any] = {
    "zero_optimization": {
        "overlap_comm": True,
        "contiguous_gradients": False,
        "stage3_prefetch_bucket_size": 1e7,
        "zero_quantized_weights": True,
        "leaf_module": {"classes": ["my.Block"]},
    },
    "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]},
    "flops_profiler": {"enabled": True, "profile_step": 3},
    "prescale_gradients": True,
    "wall_clock_breakdown": False,
}


def test_a_key_of_the_users_own_passes_and_wins_over_our_default() -> None:
    config = job(TUNED, strategy="zero3")
    base = {"zero_optimization": {"stage": 3, "overlap_comm": False}, "gradient_clipping": 1.0}
    told, lines = merged(base, config.engine.deepspeed)
    assert told["zero_optimization"]["stage"] == 3
    assert told["zero_optimization"]["overlap_comm"] is True
    assert told["comms_logger"] == TUNED["comms_logger"]
    assert told["gradient_clipping"] == 1.0
    assert base == {"zero_optimization": {"stage": 3, "overlap_comm": False}, "gradient_clipping": 1.0}
    assert len(lines) == 11
    assert lines[0] == "engine.deepspeed sets zero_optimization.overlap_comm = true (default false)"
    assert "engine.deepspeed sets flops_profiler.profile_step = 3 (default 1)" in lines


def test_deepspeed_takes_what_was_merged() -> None:
    base = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3},
    }
    told, _ = merged(base, TUNED)
    taken = deepspeed_config.DeepSpeedConfig(told)
    assert taken.zero_config.prefetch_bucket_size == 10_000_000
    assert taken.zero_config.leaf_module.classes == ["my.Block"]
    assert taken.flops_profiler_config.profile_step == 3


def test_auto_stands_for_absent_at_every_key() -> None:
    told = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "scheduler": "auto",
        "checkpoint": None,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": "auto"},
    }
    base = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}
    assert merged(base, job(told).engine.deepspeed) == (base, [])


def test_the_config_travels_through_the_pools_arguments() -> None:
    config = job(TUNED, strategy="zero3")
    assert parse_args([f"--config={config.to_json()}"]) == config


def test_a_run_time_flag_that_contradicts_the_json_is_refused_at_run_time_too() -> None:
    told = json.dumps({"engine": {"strategy": "zero2", "deepspeed": {"gradient_clipping": 1.0}}})
    assert parse_args([f"--config={told}", "--optim.clip_norm=1.0"]).optim.clip_norm == 1.0
    with pytest.raises(ContractError, match=r"contradicts optim\.clip_norm = 0\.5"):
        parse_args([f"--config={told}", "--optim.clip_norm=0.5"])


# What the job config decides


@pytest.mark.parametrize("strategy", get_args(ZeroStrategy))
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_every_setting_of_the_job_may_be_repeated_and_is_taken_from_the_base(
    strategy: str, optimizer: str
) -> None:
    optim = OptimConfig(name=optimizer)  # type: ignore[arg-type]  # one of the literals
    told: dict[str, Any] = {}
    for path, setting in job_settings(job({}, strategy=strategy, optim=optim)).items():
        contract._put(told, path, setting.value)
    config = job(told, strategy=strategy, optim=optim)
    assert merged({"train_batch_size": 128}, config.engine.deepspeed) == ({"train_batch_size": 128}, [])


def test_a_contradiction_names_both_values_and_what_to_do() -> None:
    assert refusal({"zero_optimization": {"stage": 3}}) == (
        "engine.deepspeed.zero_optimization.stage = 3 contradicts engine.strategy = 'zero2'; "
        "remove it or choose engine.strategy: 'zero1', 'zero2' or 'zero3'."
    )


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"train_batch_size": 64}, "contradicts global_batch = 128; remove it or set global_batch = 64."),
        (
            {"train_micro_batch_size_per_gpu": 2},
            "contradicts max_micro_batch = 4; remove it or set max_micro_batch = 2.",
        ),
        ({"gradient_accumulation_steps": 3}, "contradicts global_batch = 128, which it does not divide"),
        ({"gradient_accumulation_steps": 0}, "contradicts global_batch = 128, which it does not divide"),
        (
            {"gradient_clipping": 0.5},
            "contradicts optim.clip_norm = 1.0; remove it or set optim.clip_norm = 0.5.",
        ),
        ({"bf16": {"enabled": True}}, "contradicts engine.precision = 'fp32'"),
        ({"fp16": {"enabled": True}}, "contradicts engine.precision = 'fp32'"),
        ({"fp16": {"loss_scale": 128}}, "contradicts the dynamic loss scale"),
        ({"bf16": {"bf16_optimizer_states": True}}, "masters and optimizer state are fp32"),
        ({"torch_autocast": {"enabled": True}}, "contradicts engine.precision"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "gradients are accumulated in fp32"),
        ({"communication_data_type": "bf16"}, 'set engine.reduce_dtype = "bf16"'),
        ({"gradient_allreduce_op": "sum"}, "averages the gradients"),
        ({"optimizer": {"type": "Lamb"}}, 'contradicts optim.name = "adamw"'),
        ({"optimizer": {"params": {"lr": 1e-4}}}, "set optim.learning_rate = 0.0001"),
        ({"optimizer": {"params": {"betas": [0.9, 0.999]}}}, "optim.beta1, optim.beta2 = [0.9, 0.95]"),
        ({"optimizer": {"params": {"momentum": 0.9}}}, "is not a setting of optim.name = 'adamw'"),
        (
            {"zero_optimization": {"reduce_bucket_size": 1000}},
            "engine.bucket_bytes = 67108864 (16777216 elements of fp32); remove it or set engine.bucket_bytes to "
            "1000 * 4.",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "contradicts engine.cpu_offload = false",
        ),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "leaves parameters on the device"),
    ],
    ids=str,
)
def test_what_the_job_decides_cannot_be_told_otherwise(told: dict[str, Any], message: str) -> None:
    assert message in refusal(told)


def test_what_depends_on_the_world_size_is_compared_at_run_time() -> None:
    told = job({"gradient_accumulation_steps": 2}).engine.deepspeed
    assert merged({"gradient_accumulation_steps": 2}, told) == ({"gradient_accumulation_steps": 2}, [])
    with pytest.raises(
        ContractError, match=r"gradient_accumulation_steps = 2 contradicts this run's 8, which"
    ):
        merged({"gradient_accumulation_steps": 8}, told)


def test_a_bucket_counts_elements_of_the_type_that_is_reduced() -> None:
    assert bucket_elements(EngineConfig(bucket_bytes=1 << 20)) == 1 << 18
    assert bucket_elements(EngineConfig(bucket_bytes=1 << 20, reduce_dtype="bf16")) == 1 << 19
    assert bucket_elements(EngineConfig(bucket_bytes=13)) == 2  # even, and never 0


def test_true_is_not_the_number_one() -> None:
    assert "must be a whole number" in refusal({"zero_optimization": {"stage": True}}, strategy="zero1")


# Keys without a place here


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"zero_optimization": {"overlap_com": True}}, "Did you mean 'zero_optimization.overlap_comm'?"),
        ({"overlap_comm": True}, "Did you mean 'zero_optimization.overlap_comm'?"),
        ({"train_batchsize": 8}, "Did you mean 'train_batch_size'?"),
        ({"bf16": {"enable": True}}, "Did you mean 'bf16.enabled'?"),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, "offload_optimizer.device'?"),
        ({"qqq": 1}, "DeepSpeed 0.19.8 has no such key. Keys here: bf16,"),
    ],
    ids=str,
)
def test_an_unknown_key_is_refused_with_the_nearest_known_name(told: dict[str, Any], message: str) -> None:
    assert message in refusal(told)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"zero_optimization": True}, "must be an object with stage"),
        ({"zero_optimization": {"overlap_comm": 1}}, 'must be true or false, or "auto"'),
        ({"zero_optimization": {"reduce_bucket_size": 0.5}}, "must be a whole number"),
        ({"steps_per_print": True}, "must be a whole number"),
        ({"comms_logger": {"prof_ops": "all_reduce"}}, "must be a list"),
        ({"gradient_predivide_factor": "2"}, "must be a number"),
    ],
    ids=str,
)
def test_a_value_of_the_wrong_type_is_refused(told: dict[str, Any], message: str) -> None:
    assert message in refusal(told)


@pytest.mark.parametrize("path", sorted(REFUSED))
def test_a_key_without_a_place_here_is_refused_with_the_reason(path: str) -> None:
    told: dict[str, Any] = {}
    contract._put(told, path, {"enabled": True})
    assert f"engine.deepspeed.{path} = " in refusal(told)
    assert REFUSED[path] in refusal(told)


def test_a_refused_key_may_say_what_deepspeed_does_without_it() -> None:
    job({"zero_optimization": {"elastic_checkpoint": False, "offload_optimizer": {"nvme_path": None}}})


@pytest.mark.parametrize("key", ["stage3_prefetch_bucket_size", "zero_hpz_partition_size", "sub_group_size"])
def test_a_key_that_only_stage_3_reads_is_refused_with_stage_2(key: str) -> None:
    told = {"zero_optimization": {key: 1000}}
    assert "only ZeRO stage 3 reads it" in refusal(told)
    job(told, strategy="zero3")


# Forms that are often copied

COPIED_CHECKPOINT = {
    "tag_validation": False,
    "use_node_local_storage": False,
    "parallel_write": {"save_opt_states": True},
}
COPIED_ADAMW = {
    "type": "AdamW",
    "params": {"lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
}
COPIED_OPTIM = OptimConfig(learning_rate=3e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
COPIED_FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
COPIED_ZERO2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
COPIED_ZERO3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": 1e7,
    "stage3_prefetch_bucket_size": 1e7,
    "stage3_param_persistence_threshold": 1e5,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}


def test_a_whole_zero_2_config_is_taken_when_the_job_says_the_same() -> None:
    told = {
        "train_batch_size": 128,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 100,
        "optimizer": COPIED_ADAMW,
        "fp16": COPIED_FP16,
        "zero_optimization": COPIED_ZERO2,
        "gradient_clipping": 1.0,
        "wall_clock_breakdown": False,
    }
    config = job(told, optim=COPIED_OPTIM, precision="fp16", bucket_bytes=800_000_000)
    base = {"train_batch_size": 128, "gradient_accumulation_steps": 1, "fp16": {"enabled": True}}
    result, _ = merged(base, config.engine.deepspeed)
    assert "optimizer" not in result  # Penstock passes the object
    assert result["fp16"] == {key: value for key, value in COPIED_FP16.items() if key != "loss_scale"}
    assert result["steps_per_print"] == 100


def test_a_zero_3_config_without_an_optimizer_is_taken_because_the_job_has_one() -> None:
    job(
        {"zero_optimization": COPIED_ZERO3, "fp16": {"enabled": True, "initial_scale_power": 16}},
        strategy="zero3",
        precision="fp16",
        bucket_bytes=40_000_000,
    )


def test_gathering_weights_for_a_save_call_that_never_comes_is_refused() -> None:
    told = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}
    assert "Penstock writes checkpoints and exports itself" in refusal(told, strategy="zero3")


def test_the_checkpoint_section_is_refused_as_a_whole() -> None:
    message = refusal({"checkpoint": {"use_node_local_storage": True}})
    assert "engine.deepspeed.checkpoint as a whole has no effect. Remove it." in message
    assert "For DeepSpeed elsewhere" not in message


def test_wrong_forms_of_the_checkpoint_section_are_told_with_the_right_ones() -> None:
    message = refusal({"checkpoint": COPIED_CHECKPOINT})
    assert 'tag_validation = false would fail in it: it must be "Ignore", "Warn" or "Fail"' in message
    assert "parallel_write has only pipeline_stage, and DeepSpeed would ignore save_opt_states" in message


def test_deepspeed_itself_fails_and_ignores_as_the_refusal_says() -> None:
    with pytest.raises(AttributeError, match="upper"):
        deepspeed_config.DeepSpeedConfig({"train_batch_size": 1, "checkpoint": {"tag_validation": False}})
    ignored = {"train_batch_size": 1, "checkpoint": {"parallel_write": {"save_opt_states": True}}}
    assert deepspeed_config.DeepSpeedConfig(ignored).checkpoint_parallel_write_pipeline is False


def test_a_scheduler_is_refused_with_the_fields_that_stand_for_it() -> None:
    params = {"warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 1000, "total_num_steps": 100000}
    assert (
        "Remove it and set optim.schedule = 'linear', optim.learning_rate = 0.0003, optim.warmup_steps = 1000, "
        "steps = 100000."
    ) in refusal({"scheduler": {"type": "WarmupDecayLR", "params": params}})


@pytest.mark.parametrize(
    "section", [{}, {"type": "OneCycle", "params": {}}, {"type": "WarmupLR", "params": None}]
)
def test_any_scheduler_is_refused(section: dict[str, Any]) -> None:
    assert "Remove it and set optim.schedule" in refusal({"scheduler": section})


def test_a_commented_config_is_not_json() -> None:
    text = (
        '{"checkpoint": {"use_node_local_storage": false,  # Use persistent disk\n "tag_validation": "Warn"}}'
    )
    with pytest.raises(ContractError, match=r"ds_config\.json is not JSON"):
        load_json(text, "ds_config.json")


# Drift


def test_the_table_is_of_the_installed_version() -> None:
    assert deepspeed.__version__.partition("+")[0] == DEEPSPEED_VERSION


class Watched(dict[str, Any]):
    """A config that notes which keys are asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[object] = set()

    def __copy__(self) -> Watched:
        return self

    def get(self, key: object, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)  # type: ignore[call-overload]  # any key may be asked for

    def __contains__(self, key: object) -> bool:
        self.seen.add(key)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def keys(self) -> KeysView[str]:  # type: ignore[override]  # looks keys up through this object
        return KeysView(self)


def test_the_table_has_the_sections_and_keys_that_deepspeed_asks_for() -> None:
    told = Watched({"train_batch_size": 1})
    deepspeed_config.DeepSpeedConfig(told)
    ours = {*KNOWN_KEYS, *(path for path in REFUSED if "." not in path)}
    # Read only of a plain dict without a group, where DeepSpeed looks for it before anything else.
    assert ours - told.seen == {"sequence_parallel_size"}
    assert told.seen - ours == set()


def test_the_table_has_the_keys_of_the_sections_that_deepspeed_reads_by_hand() -> None:
    sections = {
        name: Watched({"enabled": True, "dtype": "bf16"} if name == "torch_autocast" else {})
        for name in ("flops_profiler", "data_types", "torch_autocast")
    }
    sections["optimizer"] = Watched({"type": "adamw"})
    sections["timers"] = Watched({"throughput": {}})
    deepspeed_config.DeepSpeedConfig({"train_batch_size": 1, **sections})
    for name, section in sections.items():
        assert section.seen == set(KNOWN_KEYS[name]), name


def test_removed_keys_are_those_that_deepspeed_rejects_as_removed() -> None:
    removed = {
        *deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS,
        *(f"zero_optimization.{key}" for key in deepspeed_config._REMOVED_ZERO_CONFIG_KEYS),
    }
    assert {path for path, reason in REFUSED.items() if reason == GONE} == removed


ZERO = KNOWN_KEYS["zero_optimization"]


@pytest.mark.parametrize(
    ("section", "model"),
    [
        (ZERO, DeepSpeedZeroConfig),
        (ZERO["offload_param"], DeepSpeedZeroOffloadParamConfig),
        (ZERO["offload_optimizer"], DeepSpeedZeroOffloadOptimizerConfig),
        (ZERO["leaf_module"], DeepSpeedZeroLeafModuleConfig),
        (KNOWN_KEYS["bf16"], DeepSpeedBF16Config),
        (KNOWN_KEYS["fp16"], DeepSpeedFP16Config),
        (KNOWN_KEYS["comms_logger"], CommsLoggerConfig),
        (KNOWN_KEYS["timers"]["throughput"], DeepSpeedThroughputTimerConfig),
        (KNOWN_KEYS["tensorboard"], TensorBoardConfig),
        (KNOWN_KEYS["csv_monitor"], CSVConfig),
        (KNOWN_KEYS["wandb"], WandbConfig),
        (KNOWN_KEYS["comet"], CometConfig),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_table_has_the_fields_and_defaults_of_deepspeeds_models(
    section: Mapping[str, Any], model: Any
) -> None:
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    assert set(section) == set(fields)
    for key, entry in section.items():
        if isinstance(entry, Mapping) or entry[0] is list:
            continue  # a section of its own; lists are long
        assert entry[1] == fields[key].get_default(), key
        if fields[key].annotation in (bool, float, str):
            assert entry[0] is fields[key].annotation, key


def test_defaults_of_keys_that_deepspeed_reads_by_hand_are_its_own() -> None:
    taken = deepspeed_config.DeepSpeedConfig({"train_batch_size": 1})
    batch = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    leaves = {key for key, entry in KNOWN_KEYS.items() if not isinstance(entry, Mapping)}
    for key in leaves - batch - {"vocabulary_size"}:
        assert getattr(taken, key) == KNOWN_KEYS[key][1], key
    for key, (_, default) in KNOWN_KEYS["flops_profiler"].items():
        assert getattr(taken.flops_profiler_config, key) == default, key
