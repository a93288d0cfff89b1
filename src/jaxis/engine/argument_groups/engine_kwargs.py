"""The engine's arguments as the keyword arguments of a function, for type checkers and for `help`. Imports no JAX."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict, TypeVar

from jaxis.engine.argument_groups.caches import DType, KVCacheDType
from jaxis.engine.argument_groups.fields import EngineArgFields
from jaxis.engine.argument_groups.kv_offloading import KVOffloadingBackend
from jaxis.engine.argument_groups.loading import LoadFormat, Quantization
from jaxis.engine.argument_groups.vision import VisionQuantization
from jaxis.sampling_params import LogprobsMode

Function = TypeVar("Function", bound=Callable[..., Any])


class EngineKwargs(TypedDict, total=False):
    """The type of `**arguments`: `EngineArgFields` without `model`. Written by `python -m tools.engine_arguments`."""

    dtype: DType
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    kv_cache_memory: int | str | None
    gpu_memory_utilization: float | None
    enable_prefix_caching: bool
    block_size: int
    kv_cache_dtype: KVCacheDType
    kv_offloading_size: float | str | None
    kv_offloading_backend: KVOffloadingBackend
    kv_offloading_dir: str | os.PathLike[str] | None
    kv_offloading_disk_size: int | str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool
    decode_context_parallel_size: int
    nnodes: int
    master_addr: str
    master_port: int
    distributed_timeout_seconds: int
    load_format: LoadFormat
    seed: int
    logprobs_mode: LogprobsMode
    enable_return_routed_experts: bool
    revision: str | None
    token: str | None
    cache_dir: str | os.PathLike[str] | None
    hf_overrides: Mapping[str, Any] | None
    quantization: Quantization | None
    chat_template: str | os.PathLike[str] | None
    fit_memory: bool
    pack_cache: bool
    pack_cache_size: int | str
    adapter: str | os.PathLike[str] | None
    merge: bool
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None
    lora_target_modules: Sequence[str] | None
    lora_modules: Mapping[str, str] | None
    lora_root: str | os.PathLike[str] | None
    speculative_config: Mapping[str, Any] | None
    mmproj: str | os.PathLike[str] | None
    vision_quantization: VisionQuantization | None
    limit_mm_per_prompt: Mapping[str, int] | None
    kv_events_config: Mapping[str, Any] | None
    kv_transfer_config: Mapping[str, Any] | None
    additional_config: Mapping[str, Any] | None


def shows_engine_arguments(function: Function) -> Function:
    """Lists the engine's arguments in the signature of a function that takes them as `**arguments`, for `help`."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters += [
        inspect.Parameter(a.name, inspect.Parameter.KEYWORD_ONLY, default=a.default, annotation=a.type)
        for a in fields(EngineArgFields)
        if a.name not in signature.parameters
    ]
    vars(function)["__signature__"] = signature.replace(parameters=parameters)
    return function
