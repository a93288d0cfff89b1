"""Oumi's parameters that nothing here reads, by section, with the reason.

Those without an effect are accepted, and named once; those that would change results are refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxis.config.parameter_group import Unused, no_effect, refused

TORCH_ONLY = "it arranges how PyTorch computes"
_EVERY_STEP = "metrics.jsonl has every step"

TRAINING: Mapping[str, Unused] = {
    **dict.fromkeys(
        (
            *("compile", "ddp_find_unused_parameters", "dataloader_num_workers", "dataloader_persistent_workers"),
            *("dataloader_prefetch_factor", "dataloader_main_process_only", "empty_device_cache_steps"),
            *("nccl_default_timeout_minutes", "gradient_checkpointing_kwargs"),
        ),
        no_effect(TORCH_ONLY),
    ),
    **dict.fromkeys(("use_deterministic", "full_determinism"), no_effect("the same run is always the same")),
    "include_performance_metrics": no_effect("metrics.jsonl always has tokens a second"),
    "logging_first_step": no_effect(_EVERY_STEP),
    "logging_strategy": no_effect(_EVERY_STEP, "steps"),
    "log_level": no_effect("--debug shows more", "info"),
    "dep_log_level": no_effect("--debug shows more", "warning"),
    "log_model_summary": no_effect("jaxis analyze shows the model"),
    "log_examples": no_effect("--show-examples shows them"),
    "telemetry": no_effect("metrics.jsonl has what was measured"),
    "lr_scheduler_kwargs": refused("the schedules have no arguments; leave it out"),
    "enable_mlflow": refused("give enable_tensorboard or enable_wandb"),
    "include_alternative_mfu_metrics": no_effect("metrics.jsonl always has mfu"),
    "reward_function_kwargs": refused("give a function of its own"),
    "gkd": refused("give TRL_DISTILLATION and training.distillation"),
    "save_epoch": refused("give save_steps"),
}
GRPO: Mapping[str, Unused] = {
    "remove_unused_columns": no_effect("reward functions get all columns"),
    **dict.fromkeys(("use_vllm", "vllm_mode"), no_effect("the engine of this process samples")),
    "vllm_gpu_memory_utilization": no_effect("the engine of this process samples", 0.9),
    "model_init_kwargs": no_effect(TORCH_ONLY),
    "repetition_penalty": refused("answers are sampled from the distribution that is trained; leave it out", 1.0),
}
PROFILER: Mapping[str, Unused] = {
    **dict.fromkeys(
        ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules"),
        no_effect("jax.profiler decides what a trace has"),
    ),
    "row_limit": no_effect("a trace is no table", 50),
}
PEFT: Mapping[str, Unused] = {
    "bnb_4bit_quant_type": no_effect("weights are quantized as jaxis quantize does", "fp4"),
    "bnb_4bit_quant_storage": no_effect("weights are quantized as jaxis quantize does", "uint8"),
    "bnb_4bit_compute_dtype": no_effect("weights are quantized as jaxis quantize does", "float32"),
    "use_bnb_nested_quant": no_effect("weights are quantized as jaxis quantize does"),
    "lora_task_type": no_effect("language models are trained", "CAUSAL_LM"),
    "lora_target_parameters": refused("only linear layers get adapters"),
    "lora_modules_to_save": refused("only adapters are trained; without use_peft all weights are"),
    "lora_bias": refused("biases are not trained; leave it out", "none"),
    "lora_init_weights": refused("adapters begin as PEFT's default has it; leave it out", "default", "true", True),
    "peft_method": refused("leave it out", "lora"),
    **dict.fromkeys(("use_dora", "llm_int8_skip_modules"), refused("leave it out")),
}
FSDP: Mapping[str, Unused] = {
    "backward_prefetch": no_effect(TORCH_ONLY, "BACKWARD_PRE"),
    **dict.fromkeys(("forward_prefetch", "use_orig_params"), no_effect(TORCH_ONLY)),
    "sync_module_states": no_effect(TORCH_ONLY, True),
    "auto_wrap_policy": no_effect("each layer gathers its weights", "NO_WRAP"),
    "min_num_params": no_effect("each layer gathers its weights", 100_000),
    "transformer_layer_cls": no_effect("each layer gathers its weights"),
    "state_dict_type": no_effect("checkpoints have whole arrays", "FULL_STATE_DICT"),
    "sharding_strategy": refused("give FULL_SHARD", "FULL_SHARD"),
    "cpu_offload": refused("weights stay on the devices; leave it out"),
    "mixed_precision": refused("give training.mixed_precision_dtype"),
}
DATASET: Mapping[str, Unused] = {
    "trust_remote_code": no_effect("data is read, never run"),
    "transform_num_workers": no_effect("rows are tokenized in this process"),
}
SPLIT: Mapping[str, Unused] = {
    "target_col": no_effect("what is learned is told by the row's keys"),
    "collator_name": no_effect("batches are made here"),
    **dict.fromkeys(("use_async_dataset", "use_torchdata"), no_effect(TORCH_ONLY)),
    "collator_kwargs": refused("give data.train.train_target"),
}
