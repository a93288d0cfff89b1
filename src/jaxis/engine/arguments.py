"""The engine's arguments, checked: for `LLM`, `jaxis serve` and the engine process. Imports no JAX."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from jaxis.config.kv_events import KVEventsConfig
from jaxis.config.kv_transfer import KVTransferConfig
from jaxis.config.speculative import LAYER_METHODS, SpeculativeConfig, parse_speculative_config
from jaxis.engine.argument_fields import (
    DType,
    EngineArgFields,
    KVCacheDType,
    KVOffloadingBackend,
    LoadFormat,
    argument_infos,
    argument_types,
)
from jaxis.engine.combinations import EngineFeature, check_combinations
from jaxis.errors import ConfigError
from jaxis.host.byte_size import parse_bytes
from jaxis.nearest_name import did_you_mean
from jaxis.quantization_rules import RequestedQuantization, parse_requested_quantization
from jaxis.sampling_params import LogprobsMode

_CHOICES = (DType, KVCacheDType, KVOffloadingBackend, LoadFormat, LogprobsMode)  # types of which each value is named


@dataclass(frozen=True)
class EngineArgs(EngineArgFields):
    """The arguments of `LLM`, checked.

    Attributes:
      model: Folder of a checkpoint in Hugging Face format, a GGUF file, or a Hub id (`org/name:Q4_K_M` is a GGUF file
        there); None is the embedded demonstration model.
      dtype: Type of weights and activations; "auto" is the checkpoint's on GPU and TPU and float32 on CPU, where
        low-precision types are slower. See docs/loading.md.
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
      block_size: Tokens of a KV cache block; on TPU 16, 32, 64, 128 or a multiple of 128.
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
      chat_template: Template of conversations in place of the checkpoint's: the name of one that jaxis brings (chatml,
        gemma, llama2, llama3, mistral, mistral-v7, phi3, zephyr), a file, or Jinja source. See docs/loading.md.
      mmproj: The vision part of a model in GGUF: its `mmproj` file. None: the one that lies beside the model's file, if
        there is one. See docs/images.md.
      vision_quantization: Low-precision weights of the vision tower: "int8", as in `quantization`. None: as in `dtype`.
        See docs/images.md.
      limit_mm_per_prompt: Most images and videos of a prompt: `{"image": 32, "video": 32}`, which None and what is not
        named are. With 0 of all that the model takes, no vision tower is loaded. See docs/images.md.
      fit_memory: Choose the width of the weights and the length of the context by what fits into the free memory,
        unless they are given, and say so. `jaxis serve` does. See docs/loading.md.
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
            value = getattr(self, name)
            choices = get_args(hints[name]) if hints[name] in _CHOICES else None
            if choices is not None and value not in choices:
                raise ConfigError(
                    f"{name}={value!r} must be one of {', '.join(choices)}{did_you_mean(str(value), choices)}"
                )
            if (
                info.minimum is not None
                and value is not None
                and (isinstance(value, bool) or not isinstance(value, int) or value < info.minimum)
            ):
                raise ConfigError(f"{name}={value!r} must be an integer of at least {info.minimum}")
        share = self.gpu_memory_utilization
        if share is not None and (isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1):
            raise ConfigError(f"gpu_memory_utilization={share!r} must be a number above 0, and at most 1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed={self.seed!r} must be an integer")
        if self.hf_overrides is not None and not isinstance(self.hf_overrides, Mapping):
            raise ConfigError(f"hf_overrides={self.hf_overrides!r} must be a dict of keys of config.json")
        self._check_devices()
        self._check_kv_offloading()
        self._check_speculation()
        self._check_adapter()
        self._check_vision()
        check_combinations(self._features())
        _ = self.kv_cache_memory_bytes, self.requested_quantization

    def _check_devices(self) -> None:
        stages = self.pipeline_parallel_size
        if stages > 1 and max(stages, self.nnodes) % min(stages, self.nnodes):
            raise ConfigError(
                f"pipeline_parallel_size={stages} and nnodes={self.nnodes}: give a multiple of nnodes, so that each "
                "host has whole stages, or a divisor of it, so that each stage has whole hosts"
            )
        if self.num_devices % self.nnodes:
            ranks = f"data_parallel_size={self.data_parallel_size} times " if self.data_parallel_size > 1 else ""
            raise ConfigError(
                f"{ranks}tensor_parallel_size={self.tensor_parallel_size} cannot be shared by nnodes={self.nnodes} "
                f"hosts: give a multiple of {self.nnodes}, as many devices as all hosts have together"
            )
        if self.decode_context_parallel_size not in (1, self.tensor_parallel_size):
            raise ConfigError(
                f"decode_context_parallel_size={self.decode_context_parallel_size} must be 1 or "
                f"tensor_parallel_size={self.tensor_parallel_size}: all devices that share the model, or none, share "
                "its context"
            )
        if self.block_size % self.decode_context_parallel_size:
            raise ConfigError(
                f"decode_context_parallel_size={self.decode_context_parallel_size} does not divide "
                f"block_size={self.block_size}: each device has as many tokens of every block; use a multiple"
            )

    def _check_speculation(self) -> None:
        speculative = self.parsed_speculative_config
        size = None if speculative is None else speculative.draft_tensor_parallel_size
        if size not in (None, self.tensor_parallel_size):
            raise ConfigError(
                f"speculative_config: draft_tensor_parallel_size={size!r} must be the model's, "
                f"{self.tensor_parallel_size}, whose devices also draft: leave it out"
            )

    def _check_adapter(self) -> None:
        if self.merge and self.adapter is None:
            raise ConfigError("merge needs adapter: the folder of what is merged")
        if self.adapter is not None and not self.merge:
            raise ConfigError(
                f"adapter={str(self.adapter)!r} needs merge, to be merged into the weights; for adapters by request, "
                "give LLM enable_lora, and jaxis serve --enable-lora --lora-modules NAME=FOLDER"
            )
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("lora_modules needs enable_lora")
        if isinstance(self.lora_target_modules, str):
            raise ConfigError('lora_target_modules is a list of names, such as ["q_proj", "v_proj"]')
        if self.max_cpu_loras is not None and len(self.lora_modules or ()) > self.max_cpu_loras:
            num_named = len(self.lora_modules or ())
            raise ConfigError(f"max_cpu_loras={self.max_cpu_loras} is less than the {num_named} of lora_modules")
        if self.lora_root is not None and not os.path.isdir(self.lora_root):
            raise ConfigError(f"lora_root={str(self.lora_root)!r} is not a folder")
        if self.adapter is not None and self.load_format == "dummy":
            raise ConfigError("adapter needs the weights that it was trained on: leave out load_format='dummy'")

    def _features(self) -> dict[EngineFeature, str]:
        """Returns the requested features, each with the argument that asks for it."""
        speculative = self.parsed_speculative_config
        method = None if speculative is None else speculative.method
        asked_for = {
            EngineFeature.NO_PREFIX_CACHE: (not self.enable_prefix_caching, "enable_prefix_caching=False"),
            EngineFeature.HOSTS: (self.nnodes > 1, f"nnodes={self.nnodes}"),
            EngineFeature.STAGES: (
                self.pipeline_parallel_size > 1,
                f"pipeline_parallel_size={self.pipeline_parallel_size}",
            ),
            EngineFeature.DATA_RANKS: (self.data_parallel_size > 1, f"data_parallel_size={self.data_parallel_size}"),
            EngineFeature.DECODE_CONTEXT: (
                self.decode_context_parallel_size > 1,
                f"decode_context_parallel_size={self.decode_context_parallel_size}",
            ),
            EngineFeature.KV_EVENTS: (self.kv_events is not None, "kv_events_config"),
            EngineFeature.KV_OFFLOADING: (self.kv_offloading_bytes is not None, "kv_offloading_size"),
            EngineFeature.KV_TRANSFER: (self.kv_transfer is not None, "kv_transfer_config"),
            EngineFeature.ADAPTERS: (self.enable_lora, "enable_lora"),
            EngineFeature.LAYER_DRAFTS: (method in LAYER_METHODS, f"speculative_config with method={method!r}"),
        }
        return {feature: argument for feature, (is_asked_for, argument) in asked_for.items() if is_asked_for}

    @property
    def num_devices(self) -> int:
        """Number of devices of all data ranks and pipeline stages."""
        return self.data_parallel_size * self.pipeline_parallel_size * self.tensor_parallel_size

    @functools.cached_property
    def kv_cache_memory_bytes(self) -> int | None:
        """`kv_cache_memory` in bytes."""
        return None if self.kv_cache_memory is None else parse_bytes(self.kv_cache_memory, "kv_cache_memory")

    @functools.cached_property
    def kv_events(self) -> KVEventsConfig | None:
        """The parsed `kv_events_config`; None publishes nothing."""
        return KVEventsConfig.of(self.kv_events_config)

    @functools.cached_property
    def kv_transfer(self) -> KVTransferConfig | None:
        """The parsed `kv_transfer_config`; None: there are no other engines."""
        return KVTransferConfig.of(self.kv_transfer_config)

    @functools.cached_property
    def kv_offloading_bytes(self) -> int | None:
        """`kv_offloading_size` in bytes."""
        if self.kv_offloading_size is None:
            return None
        try:
            gib = math.nan if isinstance(self.kv_offloading_size, bool) else float(self.kv_offloading_size)
        except (TypeError, ValueError):
            gib = math.nan
        if not 0 < gib < math.inf:
            raise ConfigError(
                f"kv_offloading_size={self.kv_offloading_size!r} must be a number of GiB, such as 8 or 0.5"
            )
        return int(gib * (1 << 30))

    @functools.cached_property
    def kv_offloading_disk_bytes(self) -> int:
        """`kv_offloading_disk_size` in bytes."""
        return parse_bytes(self.kv_offloading_disk_size, "kv_offloading_disk_size")

    def _check_vision(self) -> None:
        if self.vision_quantization not in (None, "int8"):
            raise ConfigError(f'vision_quantization={self.vision_quantization!r} must be "int8" or None')
        limits = self.limit_mm_per_prompt or {}
        is_limits = isinstance(limits, Mapping) and not set(limits) - {"image", "video"}
        if not is_limits or not all(type(limit) is int and limit >= 0 for limit in limits.values()):
            raise ConfigError(
                f"limit_mm_per_prompt={self.limit_mm_per_prompt!r} must be the most images and videos of a prompt: "
                '{"image": 8, "video": 1}'
            )

    def _check_kv_offloading(self) -> None:
        _ = self.kv_offloading_disk_bytes
        if self.kv_offloading_bytes is None and self.kv_offloading_dir is not None:
            raise ConfigError("kv_offloading_dir needs kv_offloading_size: blocks from disk go into memory first")

    @functools.cached_property
    def parsed_speculative_config(self) -> SpeculativeConfig | None:
        """The parsed `speculative_config`."""
        return parse_speculative_config(self.speculative_config)

    @functools.cached_property
    def requested_quantization(self) -> RequestedQuantization | None:
        """The parsed `quantization` and `additional_config`; a file of rules is read once."""
        return parse_requested_quantization(self.quantization, self.additional_config)
