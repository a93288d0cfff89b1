"""The engine's arguments, checked: for `LLM`, `jaxis serve` and the engine process. Imports no JAX."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, get_args

from jaxis.engine.argument_groups.caches import DType, KVCacheDType
from jaxis.engine.argument_groups.combinations import check_combinations
from jaxis.engine.argument_groups.fields import GROUPS, EngineArgFields, argument_infos, argument_types
from jaxis.engine.argument_groups.info import ArgumentInfo
from jaxis.engine.argument_groups.kv_offloading import KVOffloadingBackend
from jaxis.engine.argument_groups.loading import LoadFormat
from jaxis.errors import ConfigError
from jaxis.nearest_name import did_you_mean
from jaxis.quantization_rules import RequestedQuantization, parse_requested_quantization
from jaxis.rooms import check_room
from jaxis.sampling_params import LogprobsMode

_CHOICES = (DType, KVCacheDType, KVOffloadingBackend, LoadFormat, LogprobsMode)  # types of which each value is named


@dataclass(frozen=True)
class EngineArgs(EngineArgFields):
    """The arguments of `LLM`, checked.

    Attributes:
      model: Folder of a checkpoint in Hugging Face format, a GGUF file, or a Hub id (`org/name:Q4_K_M` is a GGUF file
        there); None is the embedded demonstration model.
      dtype: Type of weights and activations; "auto" is the checkpoint's on GPU and TPU and float32 on CPU, where few
        processors are faster with low-precision types. See docs/loading.md.
      max_model_len: Most tokens of a request, prompt and output together; None is the checkpoint's. If RoPE frequencies
        change with the length (dynamic, longrope), that is the longest length at which they do not. For a model without
        attention (Mamba), whose config.json names no length, it is 2048, and any other can be given. Shortened, with a
        note, to what the KV cache can hold.
      max_num_seqs: Most sequences that run at once, on each data rank; None is 64.
      max_num_batched_tokens: Most tokens of a step, on each data rank; longer prompts are processed in chunks. None is
        512 on CPU and 2048 elsewhere.
      kv_cache_memory: Bytes for the KV cache, or a size such as "2GiB"; None sizes it from the free memory.
      gpu_memory_utilization: Share of each GPU's memory that is taken; None is 0.9, unless `XLA_CLIENT_MEM_FRACTION` in
        the environment says otherwise. No effect on CPU and TPU, or once JAX has looked for devices in the process.
      enable_prefix_caching: Compute equal prompt prefixes only once.
      block_size: Tokens of a KV cache block.
      kv_cache_dtype: Type of cached keys and values; "int8" has a float32 scale for each token and head. "auto" is
        `dtype`; but on CPU, if that is "auto" too, it is bfloat16 for a checkpoint in bfloat16, and if it is "float16",
        it is float32, because the native kernels have no float16 cache. See docs/loading.md.
      kv_offloading_size: GiB of the host's memory for blocks that the KV cache has no room for; None is none. See
        docs/kv-cache.md.
      kv_offloading_backend: Implementation of the offloading: only "native"; accepted for vLLM's sake.
      kv_offloading_dir: A folder where those blocks are kept too, over restarts; None is none.
      kv_offloading_disk_size: Most bytes of all files there, or a size such as "100GiB".
      tensor_parallel_size: Devices to spread the model over, those of all hosts together.
      pipeline_parallel_size: Stages that the layers are divided among, each on `tensor_parallel_size` devices of its
        own. See docs/several-machines.md.
      data_parallel_size: For mixtures of experts: ranks of `tensor_parallel_size` devices, each with requests and a KV
        cache of its own, which share the experts. See docs/several-machines.md.
      enable_expert_parallel: Place the experts of each layer on these devices whole, as many on each, instead of a part
        of every expert. Their number must be a multiple of the number of devices. See docs/loading.md.
      decode_context_parallel_size: Number of the model's devices that share a cache of latents (DeepSeek and its kin)
        by tokens: 1, so that each has the whole cache, or all. See docs/loading.md.
      nnodes: Hosts that run the model together; each of the others runs `jaxis serve --nnodes N --node-rank R`. See
        docs/several-machines.md.
      master_addr: The address of this host by which the others reach it, if there are any.
      master_port: A free port there.
      distributed_timeout_seconds: Seconds that hosts wait for each other at the start.
      load_format: "auto" reads the checkpoint's weights; "dummy" makes random ones.
      seed: Seed of requests that bring none, and of random weights.
      logprobs_mode: Meaning of log-probabilities, unless a request says: see `SamplingParams` and docs/rl.md.
      enable_return_routed_experts: Return the experts of each token, unless a request says: see `SamplingParams` and
        docs/rl.md.
      revision: Branch, tag or commit of a Hub id; None is the main branch.
      token: Access token of the hub.
      cache_dir: Folder for downloads from the hub.
      hf_overrides: Keys of config.json to set; None as a value removes the key.
      quantization: Low-precision weights, made while loading: "int8", "int4", a list of rules, or the path of a YAML or
        JSON file with rules. Or, for a quantized checkpoint, "int8_activations": int8 products with its weights; or
        "dequantize": its weights in `dtype`. See docs/quantization.md.
      chat_template: Template of conversations in place of the checkpoint's: the name of one that jaxis brings (chatml,
        deepseek-v4, deepseek-v4.1, gemma, kimi-k3, llama2, llama3, mistral, mistral-v7, phi3, zephyr), a file, or Jinja
        source. See docs/loading.md.
      fit_memory: Choose the width of the weights and the length of the context by what fits into the free memory,
        unless they are given, and say so. `jaxis serve` does. See docs/loading.md.
      pack_cache: Keep the weights as the CPU kernels read them, so that later starts map them. See docs/loading.md.
      pack_cache_size: Most bytes of all models kept so, or a size such as "200GiB"; the least recently used go.
      adapter: Folder of an adapter (LoRA) in PEFT's format; needs `merge`. See docs/adapters.md.
      merge: Merge it into the weights as they are loaded: float32 sums, rounded to the checkpoint's type.
      enable_lora: Let each request have an adapter of its own (`LoRARequest`). See docs/adapters.md.
      max_loras: Most adapters in a step; requests with others wait. Each takes memory, whether or not it is used.
      max_lora_rank: Largest rank of such an adapter.
      max_cpu_loras: Most adapters that are kept in memory, in use or not; None is all.
      lora_target_modules: The layers that such adapters have room for: ends of their names, such as "q_proj", and
        "all-linear", which None is. Embeddings ("embed_tokens"), heads ("lm_head") and experts ("experts") must be
        named.
      lora_modules: Name -> folder of adapters that are loaded at the start, for a server.
      lora_root: A folder outside of which no adapter is read.
      speculative_config: Guess next tokens and compute several at a time, which changes no answer: `{"method":
        "ngram"}` copies what the text had before, `{"method": "suffix"}` also what finished outputs had; "mtp",
        "eagle3" and "draft_model" draft with layers. None: "ngram" on one CPU device with native kernels, if the model
        has no recurrent layers; else nothing. `{"num_speculative_tokens": 0}`: nothing. See
        docs/speculative-decoding.md.
      mmproj: The vision part of a model in GGUF: its `mmproj` file. None: the one that lies beside the model's file, if
        there is one. See docs/images.md.
      vision_quantization: Low-precision weights of the vision tower: "int8", as in `quantization`. None: as in `dtype`.
        See docs/images.md.
      limit_mm_per_prompt: Most images and videos of a prompt: `{"image": 32, "video": 32}`, which None and what is not
        named are. With 0 of all that the model takes, no vision tower is loaded. See docs/images.md.
      kv_events_config: Publishes what the prefix cache holds, for gateways that route by it: a dict of vLLM's keys. See
        docs/kv-cache.md.
      kv_transfer_config: Hands the blocks of prompts to other engines, or takes them from there: a dict of vLLM's keys.
        See docs/kv-cache.md.
      additional_config: Rules in the format of vLLM's TPU backend: `{"quantization": {"qwix": {"rules": [...]}}}`.

    Raises:
      ConfigError: On construction, if a value cannot be honoured whatever the model.
    """

    def __post_init__(self) -> None:
        hints = argument_types()
        for name, info in argument_infos().items():
            _check_value(
                name, getattr(self, name), info, hints[name], EngineArgFields.__dataclass_fields__[name].default
            )
        for group in GROUPS:
            group.check(self)
        asked_for = {feature: asked for group in GROUPS for feature, asked in group.features(self).items()}
        check_combinations(
            {feature: argument for feature, (is_asked_for, argument) in asked_for.items() if is_asked_for}
        )
        _ = self.requested_quantization

    @functools.cached_property
    def requested_quantization(self) -> RequestedQuantization | None:
        """The parsed `quantization` and `additional_config`; a file of rules is read once."""
        return parse_requested_quantization(self.quantization, self.additional_config)


def _check_value(name: str, value: Any, info: ArgumentInfo, hint: Any, default: Any) -> None:
    """Raises ConfigError if a value is not among the choices, too small, or of a room that is not installed."""
    if info.room and value != default:
        check_room(info.room, name)
    choices = get_args(hint) if hint in _CHOICES else None
    if choices is not None and value not in choices:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(choices)}{did_you_mean(str(value), choices)}")
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if info.minimum is not None and value is not None and (not is_integer or value < info.minimum):
        raise ConfigError(f"{name}={value!r} must be an integer of at least {info.minimum}")
