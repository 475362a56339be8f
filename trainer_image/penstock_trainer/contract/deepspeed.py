"""The user's own DeepSpeed config beside the job config: what wins over what, and what is refused.

DeepSpeed ignores many keys that it does not know, and what it is told may contradict the job config. Here every key is
known, belongs to one side, and is checked when the pipeline is compiled. In order of precedence:

    1. the job config          for the keys below; `engine.deepspeed` may repeat its value or say "auto"
    2. engine.deepspeed        every other key that DeepSpeed has and that has an effect here
    3. Penstock's defaults     what the engine asks for on its own, as overlap_comm on GPUs
    4. DeepSpeed's defaults

    DeepSpeed key                                                 is decided by
    ------------------------------------------------------------  ------------------------------------------------
    train_batch_size                                              global_batch
    train_micro_batch_size_per_gpu, gradient_accumulation_steps   global_batch, max_micro_batch and the world size
    gradient_clipping, zero_optimization.compute_grad_norm        optim.clip_norm
    optimizer                                                     optim.name, learning_rate, beta1, beta2, eps, ...
    scheduler (refused: none has the same values)                 optim.schedule, warmup_steps, min_lr_ratio; steps
    fp16.enabled, bf16.enabled, torch_autocast.enabled,           engine.precision, with fp32 masters and
      data_types.param_dtype, *_master_weights_and_grads,           optimizer state and, for fp16, a dynamic
      bf16.bf16_optimizer_states, fp16.loss_scale                   loss scale
    zero_optimization.stage                                       engine.strategy
    zero_optimization.offload_optimizer.device, .offload_param    engine.cpu_offload
    zero_optimization.reduce_bucket_size, .allgather_bucket_size  engine.bucket_bytes
    communication_data_type                                       engine.reduce_dtype
    data_types.grad_accum_dtype                                   fp32
    gradient_allreduce_op, managed_gradient_accumulation,         the training step, which averages over the global
      zero_allow_untested_optimizer, zero_force_ds_cpu_optimizer    batch and brings its own optimizer

Sections that belong to another part of Penstock (checkpoint, data_efficiency, pipeline, ...) are refused with the
field that does their work. The value "auto" stands for "as if the key were not there", at every key.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock_trainer.contract.deepspeed_keys import (
    DEEPSPEED_VERSION,
    KNOWN_KEYS,
    REFUSED,
    SCHEDULE_FIELDS,
    SCHEDULES,
    ZERO3_ONLY,
)
from penstock_trainer.contract.fields import ContractError

if TYPE_CHECKING:
    from penstock_trainer.contract.config import JobConfig
    from penstock_trainer.contract.sections.engine import EngineConfig

_HERE = "engine.deepspeed"


class JobSetting(NamedTuple):
    """A DeepSpeed key that the job config decides."""

    value: Any
    origin: str
    """The field that decides, with its value, as an error names it."""
    instead: str
    """What to do for another value; `{given}` stands for that value."""


def check_deepspeed(told: Mapping[str, Any], job: JobConfig) -> None:
    """Check `engine.deepspeed` against DeepSpeed's keys and against the job config it belongs to.

    Raises ContractError: an unknown key (the nearest is named), a value of the wrong type, a key that has no effect
    here, or a value that contradicts the job's. What depends on the world size is left to `merged`.
    """
    leaves = dict(_leaves(told))
    settings = job_settings(job)
    for path, value in leaves.items():
        if path in settings:
            _require_same(path, value, settings[path])
        elif path.startswith("optimizer."):
            raise ContractError(
                f"{_HERE}.{path} = {_shown(value)} is not a setting of optim.name = {job.optim.name!r}; remove it."
            )
        elif path.startswith(ZERO3_ONLY) and job.engine.strategy != "zero3":
            raise ContractError(
                f"{_HERE}.{path} = {_shown(value)} has no effect with engine.strategy = {job.engine.strategy!r}: only "
                "ZeRO stage 3 reads it. Remove it or set engine.strategy = 'zero3'."
            )
    _check_accumulation(leaves, job)


def job_settings(job: JobConfig) -> dict[str, JobSetting]:
    """Every DeepSpeed key that the job config decides whatever the world size, by its dotted name."""
    return {**_training_settings(job), **_precision_settings(job.engine), **_sharding_settings(job.engine)}


def _training_settings(job: JobConfig) -> dict[str, JobSetting]:
    optim = job.optim
    whole = "the training step, which averages the gradients of the global batch"
    settings = {
        "train_batch_size": _field("global_batch", job.global_batch),
        "train_micro_batch_size_per_gpu": _field("max_micro_batch", job.max_micro_batch),
        "gradient_clipping": _field("optim.clip_norm", optim.clip_norm),
        "zero_optimization.compute_grad_norm": JobSetting(True, "optim.clip_norm, which needs the norm", ""),
        "gradient_allreduce_op": JobSetting("mean", whole, "scale optim.learning_rate"),
        "managed_gradient_accumulation": JobSetting(True, whole, ""),
        "zero_allow_untested_optimizer": JobSetting(True, "optim.*: Penstock brings its own optimizer", ""),
        "zero_force_ds_cpu_optimizer": JobSetting(False, "optim.*: Penstock brings its own optimizer", ""),
        "optimizer.type": _field("optim.name", optim.name),
        "optimizer.params.lr": _field("optim.learning_rate", optim.learning_rate),
        "optimizer.params.weight_decay": _field("optim.weight_decay", optim.weight_decay),
    }
    if optim.name == "sgd":
        settings["optimizer.params.momentum"] = _field("optim.momentum", optim.momentum)
        return settings
    betas = [optim.beta1, optim.beta2]
    settings["optimizer.params.betas"] = JobSetting(
        betas, f"optim.beta1, optim.beta2 = {betas}", "set optim.beta1 and optim.beta2 to {given}"
    )
    settings["optimizer.params.eps"] = _field("optim.eps", optim.eps)
    return settings


def _precision_settings(engine: EngineConfig) -> dict[str, JobSetting]:
    origin = f"engine.precision = {engine.precision!r}"
    masters = JobSetting(False, "engine.precision: masters and optimizer state are fp32", "")
    other = "choose engine.precision"
    return {
        **{
            f"{name}.enabled": JobSetting(engine.precision == name, origin, other)
            for name in ("bf16", "fp16")
        },
        "torch_autocast.enabled": JobSetting(False, origin, other),
        "fp16.loss_scale": JobSetting(
            0,
            "the dynamic loss scale, which Penstock keeps in its checkpoints",
            "tune fp16.initial_scale_power",
        ),
        "data_types.param_dtype": JobSetting(engine.precision, origin, other),
        "data_types.grad_accum_dtype": JobSetting("fp32", "gradients are accumulated in fp32", ""),
        "bf16.bf16_master_weights_and_grads": masters,
        "bf16.bf16_optimizer_states": masters,
        "fp16.fp16_master_weights_and_grads": masters,
        "communication_data_type": _field("engine.reduce_dtype", engine.reduce_dtype),
    }


def _sharding_settings(engine: EngineConfig) -> dict[str, JobSetting]:
    bucket = JobSetting(
        bucket_elements(engine),
        f"engine.bucket_bytes = {engine.bucket_bytes} ({bucket_elements(engine)} elements of {engine.reduce_dtype})",
        f"set engine.bucket_bytes to {{given}} * {_ITEM_BYTES[engine.reduce_dtype]}",
    )
    offload = f"engine.cpu_offload = {_shown(engine.cpu_offload)}"
    return {
        "zero_optimization.stage": JobSetting(
            int(engine.strategy.removeprefix("zero")) if engine.strategy.startswith("zero") else 0,
            f"engine.strategy = {engine.strategy!r}",
            "choose engine.strategy: 'zero1', 'zero2' or 'zero3'",
        ),
        "zero_optimization.reduce_bucket_size": bucket,
        "zero_optimization.allgather_bucket_size": bucket,
        "zero_optimization.offload_optimizer.device": JobSetting(
            "cpu" if engine.cpu_offload else "none", offload, "change engine.cpu_offload (true is 'cpu')"
        ),
        "zero_optimization.offload_param.device": JobSetting(
            "none", f"{offload}, which leaves parameters on the device", ""
        ),
    }


_ITEM_BYTES = {"fp32": 4, "bf16": 2}


def bucket_elements(engine: EngineConfig) -> int:
    """engine.bucket_bytes in elements of the type in which gradients are reduced: even, as DeepSpeed wants it."""
    return max(2, engine.bucket_bytes // _ITEM_BYTES[engine.reduce_dtype] // 2 * 2)


def _field(name: str, value: Any) -> JobSetting:
    return JobSetting(value, f"{name} = {_shown(value)}", f"set {name} = {{given}}")


_OF_THE_JOB = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "gradient_allreduce_op",
        "managed_gradient_accumulation",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "communication_data_type",
        "bf16.enabled",
        "bf16.bf16_master_weights_and_grads",
        "bf16.bf16_optimizer_states",
        "fp16.enabled",
        "fp16.loss_scale",
        "fp16.fp16_master_weights_and_grads",
        "torch_autocast.enabled",
        "data_types.param_dtype",
        "data_types.grad_accum_dtype",
        "zero_optimization.stage",
        "zero_optimization.compute_grad_norm",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
    }
)
"""Keys that `merged` takes from its base alone; so are all of the optimizer section."""


def merged(base: Mapping[str, Any], told: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`told` over `base` for the keys that the user may set; `base` is left as it is.

    Returns the whole config and one log line for each key that the user set. A key of the job's own is taken from
    `base`; raises ContractError where `told` has another value for it, as it may for a batch plan that depends on the
    world size, and for all that `check_deepspeed` refuses of any job.
    """
    result = copy.deepcopy(dict(base))
    lines = []
    for path, value in _leaves(told):
        before = _get(base, path)
        if path in _OF_THE_JOB or path.startswith("optimizer."):
            if before is not None:
                origin = f"this run's {_shown(before)}, which follows from the job config and the world size"
                _require_same(path, value, JobSetting(before, origin, 'say "auto"'))
            continue
        default = before if before is not None else _default(path)
        _put(result, path, copy.deepcopy(value))
        lines.append(f"{_HERE} sets {path} = {_shown(value)} (default {_shown(default)})")
    return result, lines


def _check_accumulation(leaves: Mapping[str, Any], job: JobConfig) -> None:
    """Of what gradient_accumulation_steps must be, only this much is known before the world is."""
    accumulation = leaves.get("gradient_accumulation_steps", 1)
    if accumulation < 1 or job.global_batch % accumulation:
        raise ContractError(
            f"{_HERE}.gradient_accumulation_steps = {_shown(accumulation)} contradicts global_batch = "
            f"{job.global_batch}, which it does not divide; remove it: it follows from global_batch, max_micro_batch "
            "and the number of ranks."
        )


def _require_same(path: str, given: Any, setting: JobSetting) -> None:
    told = given.lower() if path == "optimizer.type" else given
    if _same(told, setting.value):
        return
    instead = f" or {setting.instead.format(given=_shown(given))}" if setting.instead else ""
    raise ContractError(f"{_HERE}.{path} = {_shown(given)} contradicts {setting.origin}; remove it{instead}.")


def _leaves(told: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of all that is told. Raises ContractError for what no job could accept."""
    return _leaves_of(told, KNOWN_KEYS, "")


def _leaves_of(told: Mapping[str, Any], known: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in told.items():
        path = f"{prefix}{key}"
        entry = known.get(key)
        is_silent = value is None or value == "auto"
        if path in REFUSED:
            if not is_silent and (entry is None or not _same(value, entry[1])):
                raise ContractError(_refusal(path, value))
        elif entry is None:
            raise ContractError(_unknown(path, key, known, prefix))
        elif is_silent:
            continue
        elif isinstance(entry, Mapping):
            if not isinstance(value, Mapping):
                raise ContractError(
                    f"{_HERE}.{path} = {_shown(value)} is not valid: it must be an object with {', '.join(entry)}."
                )
            yield from _leaves_of(value, entry, f"{path}.")
        else:
            _require_kind(path, value, entry[0])
            yield path, value


def _refusal(path: str, value: Any) -> str:
    forms = _wrong_checkpoint_forms(value) if path == "checkpoint" else ""
    instead = _schedule_fields(value) if path == "scheduler" else ""
    return f"{_HERE}.{path} = {_shown(value)} is not taken: {REFUSED[path]}. Remove it{instead}.{forms}"


def _wrong_checkpoint_forms(section: Any) -> str:
    """What DeepSpeed itself would make of forms of its checkpoint section that are often copied."""
    if not isinstance(section, Mapping):
        return ""
    forms = []
    mode = section.get("tag_validation", "Warn")
    if not (isinstance(mode, str) and mode.upper() in ("IGNORE", "WARN", "FAIL")):
        forms.append(
            f'tag_validation = {_shown(mode)} would fail in it: it must be "Ignore", "Warn" or "Fail"'
        )
    write = section.get("parallel_write", {})
    unread = sorted(set(write) - {"pipeline_stage"}) if isinstance(write, Mapping) else []
    if unread:
        forms.append(
            f"parallel_write has only pipeline_stage, and DeepSpeed would ignore {', '.join(unread)}"
        )
    return f" (For DeepSpeed elsewhere: {'; '.join(forms)}.)" if forms else ""


def _schedule_fields(section: Any) -> str:
    """What to set for a scheduler section of DeepSpeed's."""
    section = section if isinstance(section, Mapping) else {}
    kind, params = str(section.get("type")), section.get("params")
    remedies = [f"optim.schedule = {SCHEDULES[kind]!r}"] if kind in SCHEDULES else []
    if isinstance(params, Mapping):
        remedies += [
            f"{field} = {_shown(params[name])}"
            for name, field in SCHEDULE_FIELDS.items()
            if params.get(name, "auto") != "auto"
        ]
    return f" and set {', '.join(remedies) or 'optim.schedule and optim.warmup_steps'}"


def _unknown(path: str, key: str, known: Mapping[str, Any], prefix: str) -> str:
    elsewhere = {name.rpartition(".")[2]: name for name in _dotted(KNOWN_KEYS)}
    siblings = {name: f"{prefix}{name}" for name in known}
    names = {**elsewhere, **siblings}
    nearest = difflib.get_close_matches(key, siblings, n=1) or difflib.get_close_matches(key, names, n=1)
    hint = f" Did you mean {names[nearest[0]]!r}?" if nearest else ""
    return f"{_HERE}.{path}: DeepSpeed {DEEPSPEED_VERSION} has no such key.{hint} Keys here: {', '.join(sorted(known))}."


def _dotted(known: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, entry in known.items():
        if isinstance(entry, Mapping):
            yield from _dotted(entry, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


_KIND_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
}


def _require_kind(path: str, value: Any, kind: type) -> None:
    """JSON has one kind of number: 5e8 is a whole one. A bool never is a number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float:
        fits = is_number
    elif kind is int:
        fits = is_number and float(value).is_integer()
    else:
        fits = isinstance(value, list | tuple) if kind is list else isinstance(value, kind)
    if not fits:
        raise ContractError(
            f'{_HERE}.{path} = {_shown(value)} is not valid: it must be {_KIND_NAMES[kind]}, or "auto".'
        )


def _same(given: Any, value: Any) -> bool:
    """Equal as JSON: 1 is 1.0, but never true; a tuple is a list."""
    if isinstance(given, bool) != isinstance(value, bool):
        return False
    return bool((list(given) if isinstance(given, tuple) else given) == value)


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)


def _default(path: str) -> Any:
    return _get(KNOWN_KEYS, path)[1]


def _get(tree: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted key; None where there is none."""
    node: Any = tree
    for name in path.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[leaf] = value
