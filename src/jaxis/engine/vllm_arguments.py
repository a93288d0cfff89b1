"""vLLM's arguments of `LLM`: renamed, accepted if they change no answer, refused by name if they would.

Arguments that vLLM and jaxis share mean the same and are not listed. Source:
https://docs.vllm.ai/en/latest/api/vllm/entrypoints/llm/
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxis.engine.arguments import EngineArgs
from jaxis.errors import ConfigError, UnknownArgumentError
from jaxis.nearest_name import did_you_mean
from jaxis.sampling_params import SamplingParams

_RENAMED = {"hf_token": "token", "download_dir": "cache_dir", "kv_cache_memory_bytes": "kv_cache_memory"}

_NO_EFFECT = frozenset(
    {
        # Code in a checkpoint is never run; the architecture is jaxis' own.
        *("trust_remote_code", "code_revision"),
        # Memory and speed.
        *("swap_space", "cpu_offload_gb", "enforce_eager", "compilation_config"),
        *("max_seq_len_to_capture", "disable_custom_all_reduce", "num_gpu_blocks_override", "enable_sleep_mode"),
        *("enable_chunked_prefill", "max_num_partial_prefills", "max_long_partial_prefills", "async_scheduling"),
        *("long_prefill_token_threshold", "max_parallel_loading_workers", "disable_cascade_attn", "stream_interval"),
        *("distributed_executor_backend", "attention_backend", "attention_config", "device", "worker_cls"),
        *("block_manager", "use_v2_block_manager", "preemption_mode", "model_loader_extra_config"),
        # Features that do not exist here: logs, and options of images and sound.
        *("disable_log_stats", "disable_log_requests", "served_model_name", "profiler_config"),
        *("mm_processor_kwargs", "allowed_local_media_path", "allowed_media_domains", "disable_mm_preprocessor_cache"),
        *("mm_processor_cache_gb", "max_logprobs"),
        *("guided_decoding_backend", "structured_outputs_config"),
    }
)
"""Arguments that change no answer, whatever their value."""

_ALL_RANKS = "one LLM has all ranks: give it data_parallel_size, and nnodes for several hosts"
_ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "tokenizer_mode": (("auto", "hf", "fast"), "the tokenizer is the one in the model's folder"),
    "skip_tokenizer_init": ((False,), "give prompts as token ids; the tokenizer may stay"),
    "runner": (("auto", "generate"), "models generate text only"),
    "task": (("auto", "generate"), "models generate text only"),
    "convert": (("auto", "none"), "models generate text only"),
    "pooler_config": ((None,), "models generate text only"),
    "logits_processors": ((None, []), "SamplingParams has what is implemented"),
    **dict.fromkeys(
        (
            "data_parallel_rank",
            "data_parallel_size_local",
            "data_parallel_address",
            "data_parallel_rpc_port",
            "data_parallel_backend",
        ),
        ((None,), _ALL_RANKS),
    ),
    **dict.fromkeys(("data_parallel_hybrid_lb", "data_parallel_external_lb"), ((False, None), _ALL_RANKS)),
    "all2all_backend": (
        (None,),
        "experts are found by one gather of tokens; give enable_expert_parallel",
    ),
    "enable_eplb": ((False,), "each expert lies on one device"),
    "generation_config": (("auto",), "give sampling_params to each call"),
    "override_generation_config": ((None, {}), "give sampling_params to each call"),
    "disable_sliding_window": ((False,), "set sliding_window in hf_overrides"),
    "enable_prompt_embeds": ((False,), "prompts are strings or token ids"),
    "hf_config_path": ((None,), "give hf_overrides"),
    "config_format": (("auto", "hf"), "give a checkpoint in Hugging Face format"),
}
"""Arguments with the values that change no answer, and advice for other values."""

QUANT_METHODS = (
    *("awq", "gptq", "auto-round", "compressed-tensors", "bitsandbytes", "fp8", "fbgemm_fp8", "modelopt", "mxfp4"),
    *("torchao", "gguf", "hqq", "quark"),
)
"""Names of quantization formats of checkpoints among the values of vLLM's `quantization`."""

_DTYPES = {"half": "float16", "float": "float32"}
_SAFETENSORS = ("safetensors", "hf", "safetensors_prefetch")
# Arguments that are None in vLLM, and left out in jaxis, if they are not given.
_NOT_GIVEN = {"seed": None, "block_size": None, "enable_prefix_caching": None, "kv_offloading_backend": None}


@dataclass(frozen=True)
class TranslatedArguments:
    """vLLM's arguments in jaxis' terms.

    Attributes:
      arguments: Arguments of `EngineArgs`.
      without_effect: Names of the given arguments that have no effect here.
      quant_method: Quantization format that was given, which only config.json decides; None if not given.
    """

    arguments: dict[str, Any]
    without_effect: tuple[str, ...]
    quant_method: str | None


def translate(model: str | None, given: Mapping[str, Any]) -> TranslatedArguments:
    """Translates the arguments of `LLM` beside the model, jaxis' own and vLLM's.

    Raises:
      ConfigError: An argument would change the answers and is not implemented, two say the same, or one is unknown.
    """
    arguments, without_effect = dict(given), []
    for name in list(arguments):
        if name in _RENAMED:
            _rename(arguments, name, _RENAMED[name])
        elif name in _NO_EFFECT:
            if arguments.pop(name):
                without_effect.append(name)
        elif name in _ONLY:
            accepted, instead = _ONLY[name]
            if (value := arguments.pop(name)) not in accepted:
                wanted = " or ".join(map(repr, accepted))
                raise ConfigError(f"{name}={value!r} is not supported, only {wanted}: {instead}")
        elif name in _NOT_GIVEN and arguments[name] is None:
            del arguments[name]
    _check_tokenizer(model, arguments)
    _translate_values(arguments)
    _move_rope(arguments)
    _check_names(arguments)
    return TranslatedArguments(arguments, tuple(without_effect), _pop_quant_method(arguments))


def _check_names(arguments: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in arguments:
        if name not in known and name in SamplingParams.__dataclass_fields__:
            raise UnknownArgumentError(f"{name} is of each request: give it in SamplingParams({name}=...)")
        if name not in known:
            raise UnknownArgumentError(f"there is no argument {name!r}{did_you_mean(name, known)}")


def _rename(arguments: dict[str, Any], name: str, ours: str) -> None:
    value = arguments.pop(name)
    if ours == "token" and isinstance(value, bool):
        value = None  # True means the stored token, which is the default
    if value is None:
        return
    if arguments.get(ours) is not None:
        raise ConfigError(f"{name} and {ours} are the same: give one")
    arguments[ours] = value


def _check_tokenizer(model: str | None, arguments: dict[str, Any]) -> None:
    tokenizer, revision = arguments.pop("tokenizer", None), arguments.pop("tokenizer_revision", None)
    if tokenizer is not None and str(tokenizer) != model:
        raise ConfigError(
            f"tokenizer={str(tokenizer)!r} is not supported: the tokenizer is the one in the model's folder; make a "
            "folder with these weights and that tokenizer"
        )
    if revision is not None and revision != arguments.get("revision"):
        raise ConfigError(f"tokenizer_revision={revision!r} is not supported: the tokenizer has the model's revision")


def _pop_quant_method(arguments: dict[str, Any]) -> str | None:
    name = arguments.get("quantization")
    # Some formats add the name of a kernel: awq_marlin.
    method = next((each for each in QUANT_METHODS if name == each or str(name).startswith(f"{each}_")), None)
    if method is not None:
        del arguments["quantization"]
    return method


def _translate_values(arguments: dict[str, Any]) -> None:
    if "dtype" in arguments:
        name = str(arguments["dtype"]).removeprefix("torch.")
        arguments["dtype"] = _DTYPES.get(name, name)
    if arguments.get("load_format") in _SAFETENSORS:
        arguments["load_format"] = "auto"
    if arguments.get("max_model_len") in (-1, "auto"):
        arguments["max_model_len"] = None


def _move_rope(arguments: dict[str, Any]) -> None:
    """Moves arguments of older versions for keys of config.json to `hf_overrides`."""
    keys = {key: arguments.pop(key, None) for key in ("rope_scaling", "rope_theta")}
    keys = {key: value for key, value in keys.items() if value not in (None, {})}
    if not keys:
        return
    overrides = arguments.get("hf_overrides") or {}
    if both := keys.keys() & overrides.keys():
        raise ConfigError(f"{', '.join(sorted(both))} is given twice: as an argument and in hf_overrides")
    arguments["hf_overrides"] = {**overrides, **keys}
