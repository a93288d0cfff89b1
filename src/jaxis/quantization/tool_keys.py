"""Settings, and records of how they quantized, that quantizers write into a `quantization_config`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxis.errors import ConfigError
from jaxis.quantization.module_patterns import check_keys

# How AutoGPTQ, GPTQModel, transformers, AutoAWQ and AutoRound quantized, or how they run what they made; the weights in
# the file do not depend on these.
_RECORDS = (
    *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "mse", "act_group_aware", "v2"),
    *("gptaq", "foem", "hessian", "fallback", "failsafe", "failsafe_with_rtn", "preprocessors", "smoother", "smooth"),
    *("model_name_or_path", "model_file_base_name", "model_seqlen", "dataset", "tokenizer", "batch_size", "meta"),
    *("pad_token_id", "module_name_preceding_first_block", "cache_block_outputs", "max_input_length", "backend"),
    *("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "do_fuse", "fuse_max_seq_len"),
    *("modules_to_fuse", "offload_to_disk", "offload_to_disk_path", "pack_impl", "device", "hyb_act", "quantizer"),
    *("autoround_version", "provider", "amp", "enable_minmax_tuning", "enable_norm_bias_tuning", "lr", "iters"),
    *("enable_quanted_input", "gradient_accumulate_steps", "low_gpu_mem_usage", "low_cpu_mem_usage", "minmax_lr"),
    *("nsamples", "seqlen", "scale_dtype", "supported_types", "damp", "use_quant_input", "train_bs", "act_group_size"),
    *("act_sym", "act_dynamic", "act_data_type", "super_bits", "super_group_size", "static_kv_granularity"),
    *("static_attention_granularity", "sampler", "not_use_mse", "disable_low_gpu_mem_usage", "optimizer"),
)
# Those that say nothing with these values.
_NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "act_bits": (16, 32, None),
    "is_marlin_format": (False, None),
    "quant_block_list": None,
    "regex_config": (None, {}),
}


def check_tool_keys(config: Mapping[str, Any], settings: Iterable[str], where: str) -> None:
    """Raises ConfigError if a quantizer's object has other keys than these settings that may change the weights.

    A key that is not known may still be there, if it is empty or turned off.
    """
    known = {**dict.fromkeys(_RECORDS), **_NEUTRAL, **dict.fromkeys(settings)}
    said = {key: value for key, value in config.items() if key in known or value not in (None, False, "", [], {})}
    check_keys(said, known, where)


def read_group_size(value: object, where: str) -> int | None:
    """Reads the features that share a scale; None means all of them, which quantizers write as -1.

    Raises ConfigError if the value is not a size.
    """
    if value is None or value == -1:
        return None
    if type(value) is not int or value <= 0:
        raise ConfigError(f"{where}: group_size={value!r} is not supported; supported: a number of features, or -1")
    return value


def read_bits(value: object, known: Iterable[int], where: str) -> int:
    """Reads the bits of an element. Raises ConfigError if they are not among the known ones."""
    known = tuple(known)
    if type(value) is not int or value not in known:
        raise ConfigError(f"{where}: bits={value!r} is not supported; supported: {', '.join(map(str, known))}")
    return value


def read_bool(config: Mapping[str, Any], key: str, where: str, default: bool | None = False) -> bool | None:
    """Reads a key that is true or false. Raises ConfigError if it is neither."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {key}={value!r} must be true or false")
    return value
