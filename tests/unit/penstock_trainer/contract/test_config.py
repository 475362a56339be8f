"""The job config: one canonical spelling, and errors that say what to change."""

from __future__ import annotations

import dataclasses
import json

import pytest

from penstock_trainer.contract.config import (
    CheckpointConfig,
    DataConfig,
    JobConfig,
    ModelConfig,
    OptimConfig,
    compile_time_json,
    parse_args,
)
from penstock_trainer.contract.fields import ContractError, FieldValueError, UnknownFieldError


def test_equal_configs_have_equal_bytes_and_come_back() -> None:
    config = JobConfig(steps=300, model=ModelConfig(dim=256), data=DataConfig(seq_len=512))
    assert parse_args([f"--config={config.to_json()}"]) == config
    shuffled = json.dumps(dict(reversed(list(json.loads(config.to_json()).items()))))
    assert parse_args([f"--config={shuffled}"]).to_json() == config.to_json()


def test_the_hash_ignores_where_a_run_reads_and_writes() -> None:
    config = JobConfig()
    moved = dataclasses.replace(
        config, data=DataConfig(uri="gs://other/data"), checkpoint=CheckpointConfig(uri="gs://other/ck")
    )
    assert moved.hash == config.hash
    assert dataclasses.replace(config, seed=1).hash != config.hash


def test_the_checkpoint_root_is_the_configs_own_before_that_of_the_environment() -> None:
    assert CheckpointConfig(uri="gs://b/own").root_uri("gs://b/given") == "gs://b/own"
    assert CheckpointConfig().root_uri("gs://b/given") == "gs://b/given"
    with pytest.raises(ContractError, match=r"nowhere to write .* Give --checkpoint\.uri="):
        CheckpointConfig().root_uri("")


def test_flags_fill_what_the_compile_time_config_left_out() -> None:
    told = compile_time_json(JobConfig(), runtime=["steps", "optim.learning_rate", "data.uri"])
    config = parse_args(
        [f"--config={told}", "--steps=40", "--optim.learning_rate=0.01", "--data.uri=gs://b/a b"]
    )
    assert (config.steps, config.optim.learning_rate, config.data.uri) == (40, 0.01, "gs://b/a b")


@pytest.mark.parametrize(("text", "value"), [("100", 100), ("100.0", 100)])
def test_a_whole_number_may_be_spelled_as_kfp_does(text: str, value: int) -> None:
    assert parse_args([f"--steps={text}"]).steps == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stepz=3"], r"no field 'stepz'. Did you mean 'steps'\?"),
        (["--steps=many"], "--steps|steps = 'many' is not valid: it must be a int"),
        (["--steps=1.5"], "steps = 1.5 is not valid: it must be a whole number"),
        (["--steps=50", "--steps=60"], "--steps is given twice"),
        (['--config={"steps":50}', "--steps=60"], "steps is set by --config .* and by a flag"),
        (['--config={"optim":{"lr":1}}'], r"no field 'optim.lr'"),
        (["--config=[1]"], "must be a JSON object"),
        (["--config={"], r"--config \(the output of JobConfig.to_json\(\)\) is not JSON"),
        (["steps=3"], "not of the form --<field>=<value>"),
        (
            ["--engine.strategy=zero9"],
            "must be one of 'ddp', 'fsdp-full', 'fsdp-hybrid', 'zero1', 'zero2', 'zero3'",
        ),
        (["--model.tie_embeddings=maybe"], "must be true or false"),
    ],
)
def test_a_bad_argument_is_named_with_what_is_allowed(arguments: list[str], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        parse_args(arguments)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ModelConfig(dim=130, num_heads=4, num_kv_heads=4), "multiple of num_heads"),
        (lambda: ModelConfig(dim=12, num_heads=4, num_kv_heads=4), "even number of dims per head"),
        (lambda: ModelConfig(num_heads=4, num_kv_heads=3), "divisor of num_heads"),
        (lambda: OptimConfig(beta2=1.0), "optim.beta2"),
        (lambda: JobConfig(steps=10), "fewer than steps"),
        (lambda: JobConfig(global_batch=0), "global_batch = 0"),
    ],
)
def test_a_value_out_of_range_is_refused_at_once(build: object, message: str) -> None:
    with pytest.raises(FieldValueError, match=message):
        build()  # type: ignore[operator]


def test_a_run_time_field_that_does_not_exist_is_refused_at_compile_time() -> None:
    with pytest.raises(ContractError, match=r"optim\.lr"):
        compile_time_json(JobConfig(), runtime=["optim.lr"])


def test_an_unknown_field_error_lists_the_fields() -> None:
    with pytest.raises(UnknownFieldError, match="global_batch"):
        parse_args(["--nonsense=1"])
