"""The one declaration of each argument of an engine. Imports no JAX.

`python -m tools.engine_arguments` writes all other lists of arguments from this file: the docstring of `EngineArgs`,
`EngineKwargs`, the fields of the configuration that arguments become, and tables of the documentation.
"""

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
ConfigClass = Literal["ModelConfig", "CacheConfig", "SchedulerConfig", "ParallelConfig", "LoadConfig"]
VisionQuantization = Literal["int8"]
Quantization = str | os.PathLike[str] | Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True)
class ArgumentInfo:
    """Metadata of an argument beyond its type and default.

    Attributes:
      description: Meaning of the argument, in sentences of Markdown; links are relative to `docs/`.
      documented_default: Text of the documentation for the default, in Markdown, if the value itself does not say it.
      config: Class of `jaxis.config` with an equal field of the same name, if the argument is passed on unchanged.
      minimum: Smallest value of an integer.
      help: One line for the command line; None if there is no option.
      metavar: Placeholder for the value in the help.
      option: Name of the option, if it differs from the argument's.
      short: Short name of the option, with its dash, as vLLM has it; None if there is none.
      panel: Group of options in the help.
      speed_only: True if the argument affects only speed, not answers.
    """

    description: str
    documented_default: str | None = None
    config: ConfigClass | None = None
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
    """Each argument's type, default, description and line of help. `EngineArgs` checks them."""

    model: str | None = field(
        default=None,
        metadata=_info(
            description=(
                "Folder of a checkpoint in Hugging Face format, a GGUF file, or a Hub id (`org/name:Q4_K_M` is a GGUF "
                "file there); None is the embedded demonstration model."
            ),
        ),
    )
    dtype: DType = field(
        default="auto",
        metadata=_info(
            description=(
                'Type of weights and activations; "auto" is the checkpoint\'s on GPU and TPU and float32 on CPU, where '
                "low-precision types are slower. See [data types](loading.md#data-types)."
            ),
            metavar="TYPE",
            help="Of weights and activations: auto, float32, bfloat16 or float16.",
        ),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=_info(
            description=(
                "Most tokens of a request, prompt and output together; None is the checkpoint's. If RoPE frequencies "
                "change with the length (dynamic, longrope), that is the longest length at which they do not. For a "
                "model without attention (Mamba), whose config.json names no length, it is 2048, and any other can be "
                "given. Shortened, with a note, to what the KV cache can hold."
            ),
            documented_default="the checkpoint's",
            minimum=1,
            metavar="TOKENS",
            help="Most tokens of prompt and output together (default: the checkpoint's).",
        ),
    )
    max_num_seqs: int | None = field(
        default=None,
        metadata=_info(
            description="Most sequences that run at once, on each data rank; None is 64.",
            documented_default="64",
            minimum=1,
            metavar="NUMBER",
            help="Most completions that run at once, on each data rank.",
            speed_only=True,
        ),
    )
    max_num_batched_tokens: int | None = field(
        default=None,
        metadata=_info(
            description=(
                "Most tokens of a step, on each data rank; longer prompts are processed in chunks. None is 512 on CPU "
                "and 2048 elsewhere."
            ),
            documented_default="512 on CPU, 2048 elsewhere",
            minimum=1,
            metavar="TOKENS",
            help="Most tokens of a step, on each data rank; longer prompts are processed in chunks.",
            speed_only=True,
        ),
    )
    kv_cache_memory: int | str | None = field(
        default=None,
        metadata=_info(
            description='Bytes for the KV cache, or a size such as "2GiB"; None sizes it from the free memory.',
            documented_default="from the free memory",
            metavar="SIZE",
            help="Memory for the KV cache, in bytes or as 2GiB (default: from the free memory).",
            speed_only=True,
        ),
    )
    gpu_memory_utilization: float | None = field(
        default=None,
        metadata=_info(
            description=(
                "Share of each GPU's memory that is taken; None is 0.9, unless `XLA_CLIENT_MEM_FRACTION` in the "
                "environment says otherwise. No effect on CPU and TPU, or once JAX has looked for devices in the "
                "process."
            ),
            documented_default="0.9",
            metavar="SHARE",
            help="Of each GPU's memory, the share that is used (default: 0.9).",
            speed_only=True,
        ),
    )
    enable_prefix_caching: bool = field(
        default=True,
        metadata=_info(
            description="Compute equal prompt prefixes only once.",
            config="CacheConfig",
            option="prefix_caching",
            help="Compute equal beginnings of prompts once.",
            speed_only=True,
        ),
    )
    block_size: int = field(
        default=16,
        metadata=_info(
            description="Tokens of a KV cache block; on TPU 16, 32, 64, 128 or a multiple of 128.",
            config="CacheConfig",
            minimum=1,
            speed_only=True,
        ),
    )
    kv_cache_dtype: KVCacheDType = field(
        default="auto",
        metadata=_info(
            description=(
                'Type of cached keys and values; "int8" has a float32 scale for each token and head. "auto" is '
                '`dtype`; but on CPU, if that is "auto" too, it is bfloat16 for a checkpoint in bfloat16, and if it '
                'is "float16", it is float32, because the native kernels have no float16 cache. See [data '
                "types](loading.md#data-types)."
            ),
            metavar="TYPE",
            help="Of cached keys and values: one of these, or int8.",
        ),
    )
    kv_offloading_size: float | str | None = field(
        default=None,
        metadata=_info(
            description=(
                "GiB of the host's memory for blocks that the KV cache has no room for; None is none. See [KV "
                "offloading](kv-cache.md)."
            ),
            metavar="GIB",
            help="Host memory for blocks that the KV cache has no room for (default: none).",
            speed_only=True,
        ),
    )
    kv_offloading_backend: KVOffloadingBackend = field(
        default="native",
        metadata=_info(
            description='Implementation of the offloading: only "native"; accepted for vLLM\'s sake.',
            help="native.",
            speed_only=True,
        ),
    )
    kv_offloading_dir: str | os.PathLike[str] | None = field(
        default=None,
        metadata=_info(
            description="A folder where those blocks are kept too, over restarts; None is none.",
            metavar="FOLDER",
            help="Keep those blocks on disk, over restarts.",
            speed_only=True,
        ),
    )
    kv_offloading_disk_size: int | str = field(
        default="32GiB",
        metadata=_info(
            description='Most bytes of all files there, or a size such as "100GiB".',
            metavar="SIZE",
            help="Most bytes on disk, such as 100GiB.",
            speed_only=True,
        ),
    )
    tensor_parallel_size: int = field(
        default=1,
        metadata=_info(
            description="Devices to spread the model over, those of all hosts together.",
            config="ParallelConfig",
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
            description=(
                "Stages that the layers are divided among, each on `tensor_parallel_size` devices of its own. See "
                "[pipeline stages](several-machines.md#pipeline-stages)."
            ),
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
            description=(
                "For mixtures of experts: ranks of `tensor_parallel_size` devices, each with requests and a KV cache "
                "of its own, which share the experts. See [data ranks](several-machines.md#data-ranks)."
            ),
            config="ParallelConfig",
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
            description=(
                "Place the experts of each layer on these devices whole, as many on each, instead of a part of every "
                "expert. Their number must be a multiple of the number of devices. See [experts on several "
                "devices](loading.md#experts-on-several-devices)."
            ),
            config="ParallelConfig",
            help="Place experts on devices whole, not a part of each on every device.",
            panel="Devices: experts and contexts",
            speed_only=True,
        ),
    )
    decode_context_parallel_size: int = field(
        default=1,
        metadata=_info(
            description=(
                "Number of the model's devices that share a cache of latents (DeepSeek and its kin) by tokens: 1, so "
                "that each has the whole cache, or all. See [the context on several "
                "devices](loading.md#the-context-on-several-devices)."
            ),
            config="ParallelConfig",
            minimum=1,
            metavar="N",
            help="Devices that share the tokens of a cache of latents: 1, or all that share the model.",
            panel="Devices: experts and contexts",
            speed_only=True,
        ),
    )
    nnodes: int = field(
        default=1,
        metadata=_info(
            description=(
                "Hosts that run the model together; each of the others runs `jaxis serve --nnodes N --node-rank R`. "
                "See [several hosts](several-machines.md#several-hosts)."
            ),
            minimum=1,
            speed_only=True,
        ),
    )
    master_addr: str = field(
        default="127.0.0.1",
        metadata=_info(
            description="The address of this host by which the others reach it, if there are any.", speed_only=True
        ),
    )
    master_port: int = field(
        default=29501, metadata=_info(description="A free port there.", minimum=1, speed_only=True)
    )
    distributed_timeout_seconds: int = field(
        default=300,
        metadata=_info(description="Seconds that hosts wait for each other at the start.", minimum=1, speed_only=True),
    )
    load_format: LoadFormat = field(
        default="auto",
        metadata=_info(
            description='"auto" reads the checkpoint\'s weights; "dummy" makes random ones.',
            config="LoadConfig",
            help="Where weights come from; dummy makes random ones.",
        ),
    )
    seed: int = field(
        default=0,
        metadata=_info(
            description="Seed of requests that bring none, and of random weights.",
            config="ModelConfig",
        ),
    )
    logprobs_mode: LogprobsMode = field(
        default="raw_logprobs",
        metadata=_info(
            description=(
                "Meaning of log-probabilities, unless a request says: see `SamplingParams` and [scores and "
                "rollouts](rl.md#what-a-log-probability-means)."
            ),
            config="ModelConfig",
            metavar="MODE",
            help="What a log-probability is, unless a request says: raw_logprobs, processed_logprobs (after "
            "temperature and filters), raw_logits or processed_logits.",
            panel="Scores",
        ),
    )
    enable_return_routed_experts: bool = field(
        default=False,
        metadata=_info(
            description=(
                "Return the experts of each token, unless a request says: see `SamplingParams` and [scores and "
                "rollouts](rl.md#which-experts-a-token-went-to)."
            ),
            config="ModelConfig",
            help="Return which experts each token went to, unless a request says.",
            panel="Scores",
        ),
    )
    revision: str | None = field(
        default=None,
        metadata=_info(
            description="Branch, tag or commit of a Hub id; None is the main branch.",
            metavar="NAME",
            help="Branch, tag or commit on the hub (default: main).",
        ),
    )
    token: str | None = field(default=None, metadata=_info(description="Access token of the hub.", speed_only=True))
    cache_dir: str | os.PathLike[str] | None = field(
        default=None, metadata=_info(description="Folder for downloads from the hub.", speed_only=True)
    )
    hf_overrides: Mapping[str, Any] | None = field(
        default=None,
        metadata=_info(
            description="Keys of config.json to set; None as a value removes the key.",
            metavar="JSON",
            help="Keys of config.json to set, such as '{\"rope_theta\": 1e6}'.",
        ),
    )
    quantization: Quantization | None = field(
        default=None,
        metadata=_info(
            description=(
                'Low-precision weights, made while loading: "int8", "int4", a list of rules, or the path of a YAML or '
                'JSON file with rules. Or, for a quantized checkpoint, "int8_activations": int8 products with its '
                'weights; or "dequantize": its weights in `dtype`. See [quantization](quantization.md).'
            ),
            metavar="NAME|FILE",
            help="Low-precision weights: int8, int4, or a YAML or JSON file with rules; dequantize: a quantized "
            "model's weights in full precision.",
        ),
    )
    adapter: str | os.PathLike[str] | None = field(
        default=None,
        metadata=_info(
            description="Folder of an adapter (LoRA) in PEFT's format; needs `merge`. See [adapters](adapters.md).",
            metavar="FOLDER",
            help="An adapter (LoRA) in PEFT's format; see --merge.",
        ),
    )
    merge: bool = field(
        default=False,
        metadata=_info(
            description="Merge it into the weights as they are loaded: float32 sums, rounded to the checkpoint's type.",
            help="Merge the adapter into the weights as they are loaded.",
        ),
    )
    enable_lora: bool = field(
        default=False,
        metadata=_info(
            description=(
                "Let each request have an adapter of its own (`LoRARequest`). See "
                "[adapters](adapters.md#adapters-by-request)."
            ),
        ),
    )
    max_loras: int = field(
        default=1,
        metadata=_info(
            description=(
                "Most adapters in a step; requests with others wait. Each takes memory, whether or not it is used."
            ),
            minimum=1,
            speed_only=True,
        ),
    )
    max_lora_rank: int = field(
        default=16, metadata=_info(description="Largest rank of such an adapter.", minimum=1, speed_only=True)
    )
    max_cpu_loras: int | None = field(
        default=None,
        metadata=_info(
            description="Most adapters that are kept in memory, in use or not; None is all.", minimum=1, speed_only=True
        ),
    )
    lora_target_modules: Sequence[str] | None = field(
        default=None,
        metadata=_info(
            description=(
                'The layers that such adapters have room for: ends of their names, such as "q_proj", and '
                '"all-linear", which None is. Embeddings ("embed_tokens"), heads ("lm_head") and experts ("experts") '
                "must be named."
            ),
            documented_default='`["all-linear"]`',
            speed_only=True,
        ),
    )
    lora_modules: Mapping[str, str] | None = field(
        default=None,
        metadata=_info(
            description="Name -> folder of adapters that are loaded at the start, for a server.", speed_only=True
        ),
    )
    lora_root: str | os.PathLike[str] | None = field(
        default=None, metadata=_info(description="A folder outside of which no adapter is read.", speed_only=True)
    )
    speculative_config: Mapping[str, Any] | None = field(
        default=None,
        metadata=_info(
            description=(
                'Guess next tokens and compute several at a time, which changes no answer: `{"method": "ngram"}` '
                'copies what the text had before, `{"method": "suffix"}` also what finished outputs had; "mtp", '
                '"eagle3" and "draft_model" draft with layers. None: "ngram" on one CPU device with native kernels, '
                'if the model has no recurrent layers; else nothing. `{"num_speculative_tokens": 0}`: nothing. See '
                "[speculative decoding](speculative-decoding.md)."
            ),
            documented_default="`ngram` on one CPU device",
            metavar="JSON",
            help='Guess tokens ahead, such as \'{"method": "ngram"}\', the default on CPU; answers stay. '
            "Off: '{\"num_speculative_tokens\": 0}'.",
            speed_only=True,
        ),
    )
    chat_template: str | os.PathLike[str] | None = field(
        default=None,
        metadata=_info(
            description=(
                "Template of conversations in place of the checkpoint's: the name of one that jaxis brings "
                "(chatml, gemma, llama2, llama3, mistral, mistral-v7, phi3, zephyr), a file, or Jinja source. See "
                "[chat templates](loading.md#chat-templates)."
            ),
        ),
    )
    mmproj: str | os.PathLike[str] | None = field(
        default=None,
        metadata=_info(
            description=(
                "The vision part of a model in GGUF: its `mmproj` file. None: the one that lies beside the model's "
                "file, if there is one. See [images](images.md#gguf-models)."
            ),
            documented_default="the file beside the model's",
            metavar="FILE",
            help="The vision part of a GGUF model (mmproj file). Default: the one beside the model's file.",
        ),
    )
    vision_quantization: VisionQuantization | None = field(
        default=None,
        metadata=_info(
            description=(
                'Low-precision weights of the vision tower: "int8", as in `quantization`. None: as in `dtype`. See '
                "[images](images.md#how-it-runs)."
            ),
            metavar="NAME",
            help="Low-precision weights of the vision tower: int8.",
        ),
    )
    limit_mm_per_prompt: Mapping[str, int] | None = field(
        default=None,
        metadata=_info(
            description=(
                'Most images and videos of a prompt: `{"image": 32, "video": 32}`, which None and what is not named '
                "are. With 0 of all that the model takes, no vision tower is loaded. See [images](images.md)."
            ),
            documented_default='`{"image": 32, "video": 32}`',
            metavar="JSON",
            help='Most of a prompt, \'{"image": 8, "video": 1}\'; with 0 of both, no vision tower.',
            speed_only=True,
        ),
    )
    fit_memory: bool = field(
        default=False,
        metadata=_info(
            description=(
                "Choose the width of the weights and the length of the context by what fits into the free memory, "
                "unless they are given, and say so. `jaxis serve` does. See [memory](loading.md#memory)."
            ),
        ),
    )
    kv_events_config: Mapping[str, Any] | None = field(
        default=None,
        metadata=_info(
            description=(
                "Publishes what the prefix cache holds, for gateways that route by it: a dict of vLLM's keys. See "
                "[events](kv-cache.md#events-of-the-prefix-cache)."
            ),
            metavar="JSON",
            help="Publish what the prefix cache holds, such as '{\"enable_kv_cache_events\": true}'.",
            speed_only=True,
        ),
    )
    kv_transfer_config: Mapping[str, Any] | None = field(
        default=None,
        metadata=_info(
            description=(
                "Hands the blocks of prompts to other engines, or takes them from there: a dict of vLLM's keys. See "
                "[prefill and decode on different servers](kv-cache.md#prefill-and-decode-on-different-servers)."
            ),
            metavar="JSON",
            help='Compute prompts for other servers, or take them from there: \'{"kv_role": "kv_both"}\'.',
            speed_only=True,
        ),
    )
    additional_config: Mapping[str, Any] | None = field(
        default=None,
        metadata=_info(
            description='Rules in the format of vLLM\'s TPU backend: `{"quantization": {"qwix": {"rules": [...]}}}`.',
            metavar="JSON|FILE",
            help='Rules as \'{"quantization": {"qwix": {"rules": [...]}}}\', or a file with that.',
        ),
    )


@functools.cache
def argument_infos() -> Mapping[str, ArgumentInfo]:
    """Returns each argument's metadata by its name, in the order of the declaration."""
    return {argument.name: argument.metadata["info"] for argument in fields(EngineArgFields)}


@functools.cache
def argument_types() -> Mapping[str, Any]:
    """Returns each argument's type by its name."""
    return get_type_hints(EngineArgFields)
