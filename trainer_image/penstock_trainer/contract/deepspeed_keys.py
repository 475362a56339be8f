"""DeepSpeed's config keys as data: which there are, and which have no place beside a job config, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEEPSPEED_VERSION = "0.19.8"
"""Of which KNOWN_KEYS is a copy; a test compares the two."""

_MONITOR = {"enabled": (bool, False), "output_path": (str, ""), "job_name": (str, "DeepSpeedJobName")}

KNOWN_KEYS: Mapping[str, Any] = {
    "train_batch_size": (int, None),
    "train_micro_batch_size_per_gpu": (int, None),
    "gradient_accumulation_steps": (int, None),
    "managed_gradient_accumulation": (bool, True),
    "gradient_clipping": (float, 1.0),
    "prescale_gradients": (bool, False),
    "gradient_predivide_factor": (float, 1.0),
    "gradient_allreduce_op": (str, "mean"),
    "communication_data_type": (str, None),
    "disable_allgather": (bool, False),
    "zero_allow_untested_optimizer": (bool, False),
    "zero_force_ds_cpu_optimizer": (bool, True),
    "steps_per_print": (int, None),
    "wall_clock_breakdown": (bool, False),
    "memory_breakdown": (bool, False),
    "dump_state": (bool, False),
    "disable_python_gc": (bool, False),
    "vocabulary_size": (int, None),
    "log_level": (str, None),
    "optimizer": {
        "type": (str, None),
        "legacy_fusion": (bool, False),
        "params": {
            "lr": (float, None),
            "betas": (list, None),
            "eps": (float, None),
            "weight_decay": (float, None),
            "momentum": (float, None),
        },
    },
    "zero_optimization": {
        "stage": (int, 0),
        "contiguous_gradients": (bool, True),
        "reduce_scatter": (bool, True),
        "reduce_bucket_size": (int, 500_000_000),
        "use_multi_rank_bucket_allreduce": (bool, True),
        "allgather_partitions": (bool, True),
        "allgather_bucket_size": (int, 500_000_000),
        "overlap_comm": (bool, None),
        "compute_grad_norm": (bool, True),
        "load_from_fp32_weights": (bool, True),
        "elastic_checkpoint": (bool, False),
        "offload_param": {
            "device": (str, "none"),
            "nvme_path": (str, None),
            "buffer_count": (int, 5),
            "buffer_size": (int, 100_000_000),
            "max_in_cpu": (int, 1_000_000_000),
            "pin_memory": (bool, True),
        },
        "offload_optimizer": {
            "device": (str, "none"),
            "nvme_path": (str, None),
            "buffer_count": (int, 4),
            "pin_memory": (bool, True),
            "pipeline_read": (bool, False),
            "pipeline_write": (bool, False),
            "fast_init": (bool, False),
            "ratio": (float, 1.0),
            "super_offload": (bool, False),
            "cpuadam_cores_perc": (float, 0.8),
        },
        "zenflow": (dict, None),
        "sub_group_size": (int, 1_000_000_000),
        "cpu_offload_param": (bool, None),
        "cpu_offload_use_pin_memory": (bool, None),
        "cpu_offload": (bool, None),
        "stage3_prefetch_bucket_size": (int, 50_000_000),
        "stage3_param_persistence_threshold": (int, 100_000),
        "stage3_model_persistence_threshold": (int, 2**63 - 1),
        "stage3_max_live_parameters": (int, 1_000_000_000),
        "stage3_max_reuse_distance": (int, 1_000_000_000),
        "stage3_gather_16bit_weights_on_model_save": (bool, False),
        "stage3_module_granularity_threshold": (int, 0),
        "stage3_use_all_reduce_for_fetch_params": (bool, False),
        "stage3_allgather_sequential": (bool, False),
        "stage3_gather_fp16_weights_on_model_save": (bool, False),
        "ignore_unused_parameters": (bool, True),
        "legacy_stage1": (bool, False),
        "round_robin_gradients": (bool, False),
        "parameter_alignment": (bool, False),
        "zero_hpz_partition_size": (int, 1),
        "zero_quantized_weights": (bool, False),
        "zero_quantized_nontrainable_weights": (bool, False),
        "zero_quantized_gradients": (bool, False),
        "memory_efficient_linear": (bool, True),
        "pipeline_loading_checkpoint": (bool, False),
        "override_module_apply": (bool, True),
        "log_trace_cache_warnings": (bool, False),
        "enable_sanity_checks": (bool, False),
        "save_muon_momentum_buffer_in_memory": (bool, False),
        "leaf_module": {"classes": (list, None), "names": (list, []), "name_suffixes": (list, [])},
    },
    "bf16": {
        "enabled": (bool, False),
        "immediate_grad_update": (bool, False),
        "check_grad_overflow": (bool, True),
        "bf16_master_weights_and_grads": (bool, False),
        "bf16_optimizer_states": (bool, False),
    },
    "fp16": {
        "enabled": (bool, False),
        "auto_cast": (bool, False),
        "loss_scale": (float, 0.0),
        "initial_scale_power": (int, 16),
        "loss_scale_window": (int, 1000),
        "hysteresis": (int, 2),
        "consecutive_hysteresis": (bool, False),
        "min_loss_scale": (int, 1),
        "fp16_master_weights_and_grads": (bool, False),
    },
    "torch_autocast": {
        "enabled": (bool, False),
        "dtype": (str, None),
        "lower_precision_safe_modules": (list, None),
    },
    "data_types": {
        "grad_accum_dtype": (str, None),
        "param_dtype": (str, None),
        "buffer_dtype": (str, None),
        "keep_in_fp32_modules": (list, "auto"),
    },
    "comms_logger": {
        "enabled": (bool, False),
        "prof_all": (bool, True),
        "prof_ops": (list, []),
        "verbose": (bool, False),
        "debug": (bool, False),
    },
    "flops_profiler": {
        "enabled": (bool, False),
        "recompute_fwd_factor": (float, 0.0),
        "profile_step": (int, 1),
        "module_depth": (int, -1),
        "top_modules": (int, 1),
        "detailed": (bool, True),
        "output_file": (str, None),
    },
    "timers": {"throughput": {"enabled": (bool, True), "synchronized": (bool, True)}},
    "tensorboard": _MONITOR,
    "csv_monitor": _MONITOR,
    "wandb": {
        "enabled": (bool, False),
        "group": (str, None),
        "team": (str, None),
        "project": (str, "deepspeed"),
    },
    "comet": {
        "enabled": (bool, False),
        "samples_log_interval": (int, 100),
        "project": (str, None),
        "workspace": (str, None),
        "api_key": (str, None),
        "experiment_name": (str, None),
        "experiment_key": (str, None),
        "online": (bool, None),
        "mode": (str, None),
    },
}
"""Key -> (JSON type, DeepSpeed's default; None where it has none or finds it itself), or a section of such keys."""

_OWN_CHECKPOINTS = (
    "Penstock writes checkpoints and exports itself (checkpoint.*), never through DeepSpeed's save calls"
)
_NO_NVME = "engine.cpu_offload offloads to host memory; offload to NVMe is not offered"
_OWN_OPTIMIZER = "Penstock builds the optimizer from optim.*"
_OWN_DATA = "Penstock feeds the batches itself (data.*)"
_DATA_PARALLEL = "engine.strategy spreads a model by ZeRO alone"
GONE = f"DeepSpeed {DEEPSPEED_VERSION} has dropped it"

REFUSED: Mapping[str, str] = {
    "checkpoint": f"{_OWN_CHECKPOINTS}; engine.deepspeed.checkpoint as a whole has no effect",
    "datastates_ckpt": _OWN_CHECKPOINTS,
    "scheduler": "Penstock sets the learning rate before each step by optim.schedule, whose values none of DeepSpeed's has",
    "bfloat16": "it is the old name of 'bf16'; say engine.precision = 'bf16'",
    "activation_checkpointing": "only calls of deepspeed.checkpointing heed it; use engine.activation_checkpointing",
    "compile": "use engine.compile",
    "dataloader_drop_last": _OWN_DATA,
    "data_efficiency": _OWN_DATA,
    "pipeline": _DATA_PARALLEL,
    "tensor_parallel": _DATA_PARALLEL,
    "expert_parallel": _DATA_PARALLEL,
    "use_data_before_expert_parallelism": _DATA_PARALLEL,
    "sequence_parallel_size": _DATA_PARALLEL,
    "seq_parallel_communication_data_type": _DATA_PARALLEL,
    "hybrid_engine": "it serves generation between training steps, which Penstock does not do",
    "weight_quantization": "it serves inference, which Penstock does not do",
    "autotuning": "only DeepSpeed's own launcher heeds it",
    "aio": _NO_NVME,
    "zero_optimization.offload_param.nvme_path": _NO_NVME,
    "zero_optimization.offload_param.buffer_count": _NO_NVME,
    "zero_optimization.offload_param.buffer_size": _NO_NVME,
    "zero_optimization.offload_param.max_in_cpu": _NO_NVME,
    "zero_optimization.offload_optimizer.nvme_path": _NO_NVME,
    "zero_optimization.offload_optimizer.buffer_count": _NO_NVME,
    "zero_optimization.offload_optimizer.pipeline_read": _NO_NVME,
    "zero_optimization.offload_optimizer.pipeline_write": _NO_NVME,
    "zero_optimization.offload_optimizer.fast_init": _NO_NVME,
    "zero_optimization.offload_optimizer.ratio": "engine.cpu_offload offloads all of the optimizer state",
    "zero_optimization.offload_optimizer.super_offload": _OWN_OPTIMIZER,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _OWN_OPTIMIZER,
    "zero_optimization.save_muon_momentum_buffer_in_memory": _OWN_OPTIMIZER,
    "zero_optimization.zenflow": "it keeps optimizer state of its own, which no checkpoint of Penstock would hold",
    "zero_optimization.cpu_offload": "it is deprecated; say engine.cpu_offload",
    "zero_optimization.cpu_offload_param": "it is deprecated, and engine.cpu_offload leaves parameters on the device",
    "zero_optimization.cpu_offload_use_pin_memory": "it is deprecated; say offload_optimizer.pin_memory",
    "zero_optimization.legacy_stage1": f"{GONE}; say engine.strategy = 'zero1'",
    "zero_optimization.load_from_fp32_weights": _OWN_CHECKPOINTS,
    "zero_optimization.elastic_checkpoint": f"{_OWN_CHECKPOINTS}; they continue at any world size",
    "zero_optimization.pipeline_loading_checkpoint": _OWN_CHECKPOINTS,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _OWN_CHECKPOINTS,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _OWN_CHECKPOINTS,
    "optimizer.legacy_fusion": _OWN_OPTIMIZER,
    "optimizer.params.max_grad_norm": "gradients are clipped to optim.clip_norm",
    "optimizer.params.torch_adam": _OWN_OPTIMIZER,
    "optimizer.params.adam_w_mode": f"{_OWN_OPTIMIZER}, and optim.name = 'adamw' is AdamW",
    "optimizer.params.bias_correction": _OWN_OPTIMIZER,
    "optimizer.params.amsgrad": _OWN_OPTIMIZER,
    "comet.api_key": "a secret has no place in a pipeline's config; set COMET_API_KEY in the environment",
    **dict.fromkeys(
        (
            "amp",
            "compression_training",
            "curriculum_learning",
            "eigenvalue",
            "elasticity",
            "graph_harvesting",
            "nebula",
            "progressive_layer_drop",
            "quantize_training",
            "sparse_attention",
            "sparse_gradients",
            "zero_optimization.mics_hierarchical_params_gather",
            "zero_optimization.mics_shard_size",
            "zero_optimization.zeropp_loco_param",
        ),
        GONE,
    ),
}
"""Keys that DeepSpeed has or had and that have no place here, each with the reason. A key may still be told with the
value that DeepSpeed has without it."""

ZERO3_ONLY = (
    "zero_optimization.stage3_",
    "zero_optimization.sub_group_size",
    "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.zero_quantized_",
    "zero_optimization.memory_efficient_linear",
    "zero_optimization.leaf_module",
)
"""Prefixes of keys that stages 1 and 2 do not read."""

SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
"""DeepSpeed's schedule -> the nearest of optim.schedule. None is equal: DeepSpeed's first step has the rate of step 0."""

SCHEDULE_FIELDS = {
    "warmup_max_lr": "optim.learning_rate",
    "warmup_num_steps": "optim.warmup_steps",
    "total_num_steps": "steps",
    "cos_min_ratio": "optim.min_lr_ratio",
}
