"""Names that the plugin and vLLM share, checked against the installed vLLM before it starts.

vLLM promises plugins no stable interface: without a check, new or missing fields would be ignored silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from jaxis.errors import ConfigError, EngineError
from jaxis.integrations.vllm.sampling import APPLIED, OF_VLLM, REFUSED

SUPPORTED_VERSIONS = ((0, 31), (0, 32), (0, 33))
"""Major and minor versions of the vLLM releases with which this plugin was tested."""

NEW_REQUEST_READ = (
    *("req_id", "prompt_token_ids", "sampling_params", "block_ids", "num_computed_tokens", "prefill_token_ids"),
    *("lora_request", "mm_features"),
)
NEW_REQUEST_REFUSED = ("pooling_params", "prompt_embeds", "replay_start")
# For prompts that are embeddings, which are refused.
NEW_REQUEST_OTHER = ("prompt_is_token_ids",)

CACHED_REQUESTS_READ = ("req_ids", "resumed_req_ids", "all_token_ids", "new_block_ids", "num_computed_tokens")
# Tokens that pipeline stages send each other, and a count that the worker has itself.
CACHED_REQUESTS_OTHER = ("new_token_ids", "num_output_tokens")

STEP_READ = (
    *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens"),
    *("finished_req_ids", "preempted_req_ids", "scheduled_spec_decode_tokens"),
    *("scheduled_encoder_inputs", "free_encoder_mm_hashes"),
)
STEP_REFUSED = (
    *("block_table_updates", "kv_connector_metadata", "has_sync_kv_loads", "aux_output_connector_metadata"),
    *("ec_connector_metadata", "ec_manager_metadata", "new_block_ids_to_zero", "kv_cache_block_copies"),
    *("kv_connector_block_state", "num_invalid_spec_tokens"),
)
# Used by the scheduler only, or repeated elsewhere.
STEP_OTHER = (
    *("has_structured_output_requests", "pending_structured_output_tokens", "num_common_prefix_blocks"),
    *("num_spec_tokens_to_schedule", "skip_drafts", "scheduled_encoder_input_stats"),
    "encoder_input_updates",  # which pixels a worker may drop; this one keeps them with the request
)

GRAMMAR_READ = ("structured_output_request_ids", "grammar_bitmask")
GRAMMAR_OTHER = ("num_acceptable_drafts",)  # all: drafts are checked before they are scheduled

ADAPTER_READ = ("lora_name", "lora_int_id", "lora_path", "load_inplace")
ADAPTER_REFUSED = ("tensorizer_config_dict",)
ADAPTER_OTHER = ("base_model_name", "is_3d_lora_weight")  # for vLLM's list of models, and a refused option

ADAPTERS_READ = ("max_lora_rank", "max_loras", "max_cpu_loras", "target_modules", "lora_dtype")
ADAPTERS_REFUSED = (
    *("default_mm_loras", "enable_tower_connector_lora", "enable_mixed_moe_lora_format", "enable_moe_shared_loras"),
    "max_lora_cls_labels",
)
# Variants of vLLM's own kernels.
ADAPTERS_OTHER = ("fully_sharded_loras", "specialize_active_lora")

# Settings of speculative_config that would change the tokens or their number; other values are refused.
SPECULATIVE_DEFAULTS = {
    "rejection_sample_method": "standard",
    "num_speculative_tokens_per_batch_size": None,
    "enable_adaptive_verification": False,
}

POOLING_READ = ("task", "dimensions", "use_activation", "extra_kwargs")
POOLING_REFUSED = (
    *("step_tag_id", "returned_token_ids", "requires_token_ids", "late_interaction_params", "late_chunking_params"),
)
SECOND_START = "compressed_token_type_ids"
"""Key in `extra_kwargs`: start of the second text of a pair; in vLLM from 0.33, also its end."""
# Keys in `extra_kwargs` of pairs. vLLM applies the others when it makes token ids.
PAIR_KEYS = (SECOND_START, "max_tokens_per_query", "max_tokens_per_doc", "chat_template_kwargs")
POOLING_OTHER = ("skip_reading_prefix_cache", "output_kind")  # there is no prefix cache; vLLM's own

RESULT_WRITTEN = (
    "req_ids",
    "req_id_to_index",
    "sampled_token_ids",
    "logprobs",
    "prompt_logprobs_dict",
    "pooler_output",
)

RESULT_METHODS = ("get_output", "get_kv_connector_output")

PLATFORM_HOOKS = (
    *("import_kernels", "get_device_name", "get_device_total_memory", "inference_mode", "set_device"),
    *("manual_seed_all", "pre_register_and_update", "apply_config_platform_defaults", "check_and_update_config"),
    *("update_block_size_for_backend", "is_pin_memory_available", "support_hybrid_kv_cache"),
    "validate_request",
)
WORKER_METHODS = (
    *("init_device", "load_model", "get_kv_cache_spec", "get_supported_kv_cache_layouts", "set_kv_cache_layout"),
    *("compile_or_warm_up_model", "execute_model", "sample_tokens", "synchronize_device", "check_health", "shutdown"),
    *("add_lora", "remove_lora", "pin_lora", "list_loras"),
)


def check_version() -> None:
    """Raises ConfigError for a vLLM version that this plugin was not tested with."""
    from vllm.version import __version__, __version_tuple__

    if tuple(__version_tuple__[:2]) not in SUPPORTED_VERSIONS:
        supported = ", ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED_VERSIONS)
        raise ConfigError(
            f"jaxis runs inside vLLM {supported}, and vLLM {__version__} is installed: install such a version, or "
            "leave jaxis out of VLLM_PLUGINS"
        )


def check_contract() -> None:
    """Raises ConfigError with the differences between the installed vLLM and the names that the plugin expects."""
    if differences := list(_differences()):
        raise ConfigError(
            f"this vLLM is not the one that jaxis knows: {'; '.join(differences)}: install a released vLLM of a "
            "supported version, or leave jaxis out of VLLM_PLUGINS"
        )


def check_step(scheduler_output: Any, *, is_pooling: bool = False) -> None:
    """Raises EngineError for parts of a step that would otherwise be ignored.

    Args:
      scheduler_output: vLLM's SchedulerOutput.
      is_pooling: True if the step's requests are for vectors.
    """
    asked = [name for name in STEP_REFUSED if getattr(scheduler_output, name, None)]
    for request in scheduler_output.scheduled_new_reqs:
        values = {name: getattr(request, name, None) for name in NEW_REQUEST_REFUSED}
        if is_pooling:
            values["pooling_params"] = None
        # A tensor has no truth value, but is something.
        asked += [name for name, value in values.items() if hasattr(value, "shape") or value]
    if asked:
        raise EngineError(f"vLLM's scheduler asks for {', '.join(asked)}, which jaxis' worker does not do")


def _differences() -> Iterator[str]:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.request import LoRARequest
    from vllm.platforms.interface import Platform
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched import output
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
    from vllm.v1.worker.worker_base import WorkerBase

    # Fields that are read must exist. Refused and ignored fields differ among the supported versions.
    exact: tuple[tuple[Any, Iterable[str], Iterable[str]], ...] = (
        (output.NewRequestData, NEW_REQUEST_READ, (*NEW_REQUEST_REFUSED, *NEW_REQUEST_OTHER)),
        (output.CachedRequestData, CACHED_REQUESTS_READ, CACHED_REQUESTS_OTHER),
        (output.SchedulerOutput, STEP_READ, (*STEP_REFUSED, *STEP_OTHER)),
        (output.GrammarOutput, GRAMMAR_READ, GRAMMAR_OTHER),
        (LoRARequest, ADAPTER_READ, (*ADAPTER_REFUSED, *ADAPTER_OTHER)),
        (LoRAConfig, ADAPTERS_READ, (*ADAPTERS_REFUSED, *ADAPTERS_OTHER)),
        (SamplingParams, APPLIED, (*OF_VLLM, *REFUSED)),
        (PoolingParams, POOLING_READ, (*POOLING_REFUSED, *POOLING_OTHER)),
    )
    for kind, read, others in exact:
        names = _field_names(kind)
        if unknown := sorted(names - {*read, *others}):
            yield f"{kind.__name__} has {', '.join(unknown)}"
        if missing := sorted(set(read) - names):
            yield f"{kind.__name__} lacks {', '.join(missing)}"
    if unknown := sorted(AsyncModelRunnerOutput.__abstractmethods__ - set(RESULT_METHODS)):
        yield f"AsyncModelRunnerOutput has {', '.join(unknown)}"
    if missing := sorted(set(RESULT_WRITTEN) - _field_names(ModelRunnerOutput)):
        yield f"ModelRunnerOutput lacks {', '.join(missing)}"
    for kind, names in ((Platform, PLATFORM_HOOKS), (WorkerBase, WORKER_METHODS)):
        if missing := [name for name in names if not hasattr(kind, name)]:
            yield f"{kind.__name__} lacks {', '.join(missing)}"


def _field_names(kind: Any) -> set[str]:
    """Returns the field names of a dataclass or a msgspec.Struct."""
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    return set(kind.__struct_fields__)
