"""What an engine can be asked for: each argument's type, default and line of help. Imports no JAX."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_type_hints

from jaxis.sampling_params import LogprobsMode

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "float32", "bfloat16", "float16", "int8"]
KVOffloadingBackend = Literal["native"]
LoadFormat = Literal["auto", "dummy"]
Quantization = str | os.PathLike[str] | Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True)
class ArgumentInfo:
    """Metadata of an argument beyond its type, default and description.

    Attributes:
      minimum: Smallest value of an integer.
      help: One line for the command line; None if there is no option.
      metavar: Placeholder for the value in the help.
      option: The option's name, if it differs from the argument's.
      short: A short name of the option, with its dash, as vLLM has it; None if there is none.
      panel: The group of options in the help.
      speed_only: Whether it affects only speed, not answers.
    """

    minimum: int | None = None
    help: str | None = None
    metavar: str | None = None
    option: str | None = None
    short: str | None = None
    panel: str = "Engine"
    speed_only: bool = False


def _info(**info: Any) -> dict[str, ArgumentInfo]:
    return {"info": ArgumentInfo(**info)}


@dataclass(frozen=True)
class EngineArgFields:
    """Each argument's type, default and line of help. `EngineArgs` says what it means, and checks it."""

    model: str | None = field(default=None, metadata=_info())
    dtype: DType = field(
        default="auto",
        metadata=_info(metavar="TYPE", help="Of weights and activations: auto, float32, bfloat16 or float16."),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=_info(
            minimum=1, metavar="TOKENS", help="Most tokens of prompt and output together (default: the checkpoint's)."
        ),
    )
    max_num_seqs: int | None = field(
        default=None,
        metadata=_info(
            minimum=1, metavar="NUMBER", help="Most completions that run at once, on each data rank.", speed_only=True
        ),
    )
    max_num_batched_tokens: int | None = field(
        default=None,
        metadata=_info(
            minimum=1,
            metavar="TOKENS",
            help="Most tokens of a step, on each data rank; longer prompts are processed in chunks.",
            speed_only=True,
        ),
    )
    kv_cache_memory: int | str | None = field(
        default=None,
        metadata=_info(
            metavar="SIZE",
            help="Memory for the KV cache, in bytes or as 2GiB (default: from the free memory).",
            speed_only=True,
        ),
    )
    gpu_memory_utilization: float | None = field(
        default=None,
        metadata=_info(
            metavar="SHARE", help="Of each GPU's memory, the share that is used (default: 0.9).", speed_only=True
        ),
    )
    enable_prefix_caching: bool = field(
        default=True,
        metadata=_info(option="prefix_caching", help="Compute equal beginnings of prompts once.", speed_only=True),
    )
    block_size: int = field(default=16, metadata=_info(minimum=1, speed_only=True))
    kv_cache_dtype: KVCacheDType = field(
        default="auto", metadata=_info(metavar="TYPE", help="Of cached keys and values: one of these, or int8.")
    )
    kv_offloading_size: float | str | None = field(
        default=None,
        metadata=_info(
            metavar="GIB",
            help="Host memory for blocks that the KV cache has no room for (default: none).",
            speed_only=True,
        ),
    )
    kv_offloading_backend: KVOffloadingBackend = field(
        default="native", metadata=_info(help="native.", speed_only=True)
    )
    kv_offloading_dir: str | os.PathLike[str] | None = field(
        default=None,
        metadata=_info(metavar="FOLDER", help="Keep those blocks on disk, over restarts.", speed_only=True),
    )
    kv_offloading_disk_size: int | str = field(
        default="32GiB",
        metadata=_info(metavar="SIZE", help="Most bytes on disk, such as 100GiB.", speed_only=True),
    )
    tensor_parallel_size: int = field(
        default=1,
        metadata=_info(
            minimum=1,
            short="-tp",
            metavar="N",
            help="Devices to spread the model over.",
            panel="Devices",
            speed_only=True,
        ),
    )
    pipeline_parallel_size: int = field(
        default=1,
        metadata=_info(
            minimum=1,
            short="-pp",
            metavar="N",
            help="Stages that share the layers, each with so many devices of its own.",
            panel="Devices",
            speed_only=True,
        ),
    )
    data_parallel_size: int = field(
        default=1,
        metadata=_info(
            minimum=1,
            short="-dp",
            metavar="N",
            help="Ranks of so many devices, each with its own requests, that share a model's experts.",
            panel="Devices",
            speed_only=True,
        ),
    )
    enable_expert_parallel: bool = field(
        default=False,
        metadata=_info(
            help="Place experts on devices whole, not a part of each on every device.",
            panel="Devices: experts and contexts",
            speed_only=True,
        ),
    )
    decode_context_parallel_size: int = field(
        default=1,
        metadata=_info(
            minimum=1,
            metavar="N",
            help="Devices that share the tokens of a cache of latents: 1, or all that share the model.",
            panel="Devices: experts and contexts",
            speed_only=True,
        ),
    )
    nnodes: int = field(default=1, metadata=_info(minimum=1, speed_only=True))
    master_addr: str = field(default="127.0.0.1", metadata=_info(speed_only=True))
    master_port: int = field(default=29501, metadata=_info(minimum=1, speed_only=True))
    distributed_timeout_seconds: int = field(default=300, metadata=_info(minimum=1, speed_only=True))
    load_format: LoadFormat = field(
        default="auto", metadata=_info(help="Where weights come from; dummy makes random ones.")
    )
    seed: int = field(default=0, metadata=_info())
    logprobs_mode: LogprobsMode = field(
        default="raw_logprobs",
        metadata=_info(
            metavar="MODE",
            help="What a log-probability is, unless a request says: raw_logprobs, processed_logprobs (after "
            "temperature and filters), raw_logits or processed_logits.",
            panel="Scores",
        ),
    )
    enable_return_routed_experts: bool = field(
        default=False,
        metadata=_info(help="Return which experts each token went to, unless a request says.", panel="Scores"),
    )
    revision: str | None = field(
        default=None, metadata=_info(metavar="NAME", help="Branch, tag or commit on the hub (default: main).")
    )
    token: str | None = field(default=None, metadata=_info(speed_only=True))
    cache_dir: str | os.PathLike[str] | None = field(default=None, metadata=_info(speed_only=True))
    hf_overrides: Mapping[str, Any] | None = field(
        default=None,
        metadata=_info(metavar="JSON", help="Keys of config.json to set, such as '{\"rope_theta\": 1e6}'."),
    )
    quantization: Quantization | None = field(
        default=None,
        metadata=_info(
            metavar="NAME|FILE",
            help="Low-precision weights: int8, int4, or a YAML or JSON file with rules; dequantize: a quantized "
            "model's weights in full precision.",
        ),
    )
    adapter: str | os.PathLike[str] | None = field(
        default=None,
        metadata=_info(metavar="FOLDER", help="An adapter (LoRA) in PEFT's format; see --merge."),
    )
    merge: bool = field(default=False, metadata=_info(help="Merge the adapter into the weights as they are loaded."))
    enable_lora: bool = field(default=False, metadata=_info())
    max_loras: int = field(default=1, metadata=_info(minimum=1, speed_only=True))
    max_lora_rank: int = field(default=16, metadata=_info(minimum=1, speed_only=True))
    max_cpu_loras: int | None = field(default=None, metadata=_info(minimum=1, speed_only=True))
    lora_target_modules: Sequence[str] | None = field(default=None, metadata=_info(speed_only=True))
    lora_modules: Mapping[str, str] | None = field(default=None, metadata=_info(speed_only=True))
    lora_root: str | os.PathLike[str] | None = field(default=None, metadata=_info(speed_only=True))
    speculative_config: Mapping[str, Any] | None = field(
        default=None,
        metadata=_info(
            metavar="JSON",
            help='Guess tokens ahead, such as \'{"method": "ngram"}\', the default on CPU; answers stay. '
            "Off: '{\"num_speculative_tokens\": 0}'.",
            speed_only=True,
        ),
    )
    chat_template: str | os.PathLike[str] | None = field(default=None, metadata=_info())
    limit_mm_per_prompt: Mapping[str, int] | None = field(
        default=None,
        metadata=_info(
            metavar="JSON",
            help="Most images of a prompt, '{\"image\": 32}'; with 0, the vision tower is not loaded.",
            speed_only=True,
        ),
    )
    fit_memory: bool = field(default=False, metadata=_info())
    kv_events_config: Mapping[str, Any] | None = field(
        default=None,
        metadata=_info(
            metavar="JSON",
            help="Publish what the prefix cache holds, such as '{\"enable_kv_cache_events\": true}'.",
            speed_only=True,
        ),
    )
    kv_transfer_config: Mapping[str, Any] | None = field(
        default=None,
        metadata=_info(
            metavar="JSON",
            help='Compute prompts for other servers, or take them from there: \'{"kv_role": "kv_both"}\'.',
            speed_only=True,
        ),
    )
    additional_config: Mapping[str, Any] | None = field(
        default=None,
        metadata=_info(
            metavar="JSON|FILE", help='Rules as \'{"quantization": {"qwix": {"rules": [...]}}}\', or a file with that.'
        ),
    )


@functools.cache
def argument_infos() -> Mapping[str, ArgumentInfo]:
    """Each argument's information, in their order."""
    return {argument.name: argument.metadata["info"] for argument in fields(EngineArgFields)}


@functools.cache
def argument_types() -> Mapping[str, Any]:
    """Each argument's type."""
    return get_type_hints(EngineArgFields)
