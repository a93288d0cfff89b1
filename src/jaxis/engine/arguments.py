"""The engine's arguments, shared by `LLM`, `jaxis serve` and the engine process. Imports no JAX."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

from jaxis.config.kv_events import KVEventsConfig
from jaxis.config.kv_transfer import KVTransferConfig
from jaxis.config.speculative import LAYER_METHODS, SpeculativeConfig, parse_speculative_config
from jaxis.errors import ConfigError
from jaxis.host.byte_size import parse_bytes
from jaxis.quantization_rules import RequestedQuantization, parse_requested_quantization

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "float32", "bfloat16", "float16", "int8"]
KVOffloadingBackend = Literal["native"]
LoadFormat = Literal["auto", "dummy"]
Function = TypeVar("Function", bound=Callable[..., Any])
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
class EngineArgs:
    """The arguments of `LLM`, checked.

    Attributes:
      model: Folder of a checkpoint in Hugging Face format, a GGUF file, or a Hub id (`org/name:Q4_K_M` is a GGUF file
        there); None is the embedded demonstration model.
      dtype: Type of weights and activations; "auto" is the checkpoint's on GPU and TPU and float32 on CPU, where
        low-precision types are slower.
      max_model_len: Most tokens of a request, prompt and output together; None is the checkpoint's. Shortened, with a
        note, to what the KV cache can hold.
      max_num_seqs: Most sequences that run at once, on each data rank; None is 64.
      max_num_batched_tokens: Most tokens of a step, on each data rank; longer prompts are processed in chunks. None is
        512 on CPU and 2048 elsewhere.
      kv_cache_memory: Bytes for the KV cache, or a size such as "2GiB"; None sizes it from the free memory.
      enable_prefix_caching: Compute equal prompt prefixes once.
      block_size: Tokens of a KV cache block.
      kv_cache_dtype: Type of cached keys and values; "int8" has a float32 scale for each token and head. "auto" is
        `dtype`; but on CPU, if that is "auto" too, it is bfloat16 for a checkpoint in bfloat16, and if it is "float16",
        it is float32, because the native kernels have no float16 cache.
      kv_offloading_size: GiB of the host's memory for blocks that the KV cache has no room for; None is none. See
        docs/kv-offloading.md.
      kv_offloading_backend: Whose they are: only "native".
      kv_offloading_dir: A folder where those blocks are kept too, over restarts; None is none.
      kv_offloading_disk_size: Bytes of all files there, or a size such as "100GiB".
      tensor_parallel_size: Devices to spread the model over, those of all hosts together.
      pipeline_parallel_size: Stages that the layers are divided among, each on `tensor_parallel_size` devices of its
        own. See docs/pipeline-stages.md.
      data_parallel_size: For mixtures of experts: ranks of `tensor_parallel_size` devices, each with requests and a KV
        cache of its own, which share the experts.
      enable_expert_parallel: Place the experts of each layer on these devices whole, as many on each, instead of a part
        of every expert. Their number must be a multiple of the number of devices.
      decode_context_parallel_size: Of these devices, how many share the tokens of a cache of latents (DeepSeek and its
        kin): 1, so that each has the whole cache, or all.
      nnodes: Hosts that run the model together; each of the others runs `jaxis serve --nnodes N --node-rank R`. See
        docs/hosts.md.
      master_addr: The address of this host by which the others reach it, if there are any.
      master_port: A free port there.
      distributed_timeout_seconds: How long hosts wait for each other at the start.
      load_format: "auto" reads the checkpoint's weights; "dummy" makes random ones.
      seed: Seed for requests without one, and for random weights.
      revision: Branch, tag or commit of a Hub id; None is the main branch.
      token: Access token of the hub.
      cache_dir: Where downloads from the hub are kept.
      hf_overrides: Keys of config.json to set; None as a value removes the key.
      quantization: Low-precision weights, made while loading: "int8", "int4", a list of rules, or the path of a YAML or
        JSON file with rules. Or, for a quantized checkpoint, "int8_activations": int8 products with its weights; or
        "dequantize": its weights in `dtype`. See docs/quantization.md.
      speculative_config: Guess next tokens and compute several at a time, which changes no answer: {"method": "ngram"}
        copies what the text had before, {"method": "suffix"} also what finished outputs had; "mtp", "eagle3" and
        "draft_model" draft with layers. See docs/speculative-decoding.md.
      chat_template: What renders conversations in place of the checkpoint's template: the name of one that jaxis brings
        (chatml, gemma, llama2, llama3, mistral, mistral-v7, phi3, zephyr), a file, or Jinja source.
      fit_memory: Choose the width of the weights and the length of the context by what fits into the free memory,
        unless they are given, and say so. `jaxis serve` does.
      kv_events_config: Publishes what the prefix cache holds, for gateways that route by it: a dict of vLLM's keys; see
        docs/monitoring.md.
      kv_transfer_config: Hands the blocks of prompts to other engines, or takes them from there: a dict of vLLM's keys;
        see docs/prefill-decode.md.
      additional_config: Rules in the format of vLLM's TPU backend: {"quantization": {"qwix": {"rules": [...]}}}.

    Raises:
      ConfigError: On construction, if a value cannot be honoured whatever the model.
    """

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
    speculative_config: Mapping[str, Any] | None = field(
        default=None,
        metadata=_info(
            metavar="JSON", help='Guess tokens ahead, such as \'{"method": "ngram"}\'; answers stay.', speed_only=True
        ),
    )
    chat_template: str | os.PathLike[str] | None = field(default=None, metadata=_info())
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

    def __post_init__(self) -> None:
        hints = argument_types()
        for name, info in argument_infos().items():
            value = getattr(self, name)
            choices = (
                get_args(hints[name]) if hints[name] in (DType, KVCacheDType, KVOffloadingBackend, LoadFormat) else None
            )
            if choices is not None and value not in choices:
                raise ConfigError(f"{name}={value!r} must be one of {', '.join(choices)}")
            if (
                info.minimum is not None
                and value is not None
                and (isinstance(value, bool) or not isinstance(value, int) or value < info.minimum)
            ):
                raise ConfigError(f"{name}={value!r} must be an integer of at least {info.minimum}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed={self.seed!r} must be an integer")
        if self.hf_overrides is not None and not isinstance(self.hf_overrides, Mapping):
            raise ConfigError(f"hf_overrides={self.hf_overrides!r} must be a dict of keys of config.json")
        self._check_devices()
        self._check_kv_offloading()
        self._check_kv_events()
        self._check_kv_transfer()
        self._check_speculation()
        self._check_stages()
        _ = self.kv_cache_memory_bytes, self.requested_quantization

    def _check_devices(self) -> None:
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

    def _check_kv_events(self) -> None:
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise ConfigError("kv_events_config publishes what the prefix cache holds: leave enable_prefix_caching on")

    def _check_kv_transfer(self) -> None:
        if self.kv_transfer is None:
            return
        if not self.enable_prefix_caching:
            raise ConfigError("kv_transfer_config needs prefix caching, which finds the blocks: leave one of them out")
        if self.nnodes > 1:
            raise ConfigError(f"kv_transfer_config is for one host, not for nnodes={self.nnodes}: leave it out")
        if self.data_parallel_size > 1:
            raise ConfigError(
                f"kv_transfer_config is for one data rank, not for data_parallel_size={self.data_parallel_size}: leave "
                "it out"
            )

    def _check_speculation(self) -> None:
        speculative = self.parsed_speculative_config
        if speculative is None or speculative.method not in LAYER_METHODS:
            return
        if self.nnodes > 1:
            raise ConfigError(
                f"speculative_config: method={speculative.method!r} is not implemented for several hosts "
                f"(nnodes={self.nnodes}): give ngram or suffix"
            )
        if self.data_parallel_size > 1:
            raise ConfigError(
                f"speculative_config: method={speculative.method!r} is for one data rank, not for "
                f"data_parallel_size={self.data_parallel_size}: give ngram or suffix"
            )

    def _check_stages(self) -> None:
        if self.pipeline_parallel_size == 1:
            return
        for name, is_given in (
            ("nnodes", self.nnodes > 1),
            ("data_parallel_size", self.data_parallel_size > 1),
            ("decode_context_parallel_size", self.decode_context_parallel_size > 1),
            ("kv_offloading_size", self.kv_offloading_bytes is not None),
            ("speculative_config", self.parsed_speculative_config is not None),
            ("kv_transfer_config", self.kv_transfer is not None),
        ):
            if is_given:
                raise ConfigError(
                    f"{name} is not implemented with pipeline_parallel_size={self.pipeline_parallel_size}: leave one "
                    "of them out"
                )

    @property
    def num_devices(self) -> int:
        """Devices of all data ranks and pipeline stages."""
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

    def _check_kv_offloading(self) -> None:
        _ = self.kv_offloading_disk_bytes
        if self.kv_offloading_bytes is None:
            if self.kv_offloading_dir is not None:
                raise ConfigError("kv_offloading_dir needs kv_offloading_size: blocks from disk go into memory first")
            return
        if not self.enable_prefix_caching:
            raise ConfigError("kv_offloading_size needs prefix caching, which finds the blocks: leave one of them out")
        if self.nnodes > 1:
            raise ConfigError(f"kv_offloading_size is for one host, not for nnodes={self.nnodes}: leave it out")

    @functools.cached_property
    def parsed_speculative_config(self) -> SpeculativeConfig | None:
        """The parsed `speculative_config`."""
        return parse_speculative_config(self.speculative_config)

    @functools.cached_property
    def requested_quantization(self) -> RequestedQuantization | None:
        """The parsed `quantization` and `additional_config`; a file of rules is read once."""
        return parse_requested_quantization(self.quantization, self.additional_config)


class EngineKwargs(TypedDict, total=False):
    """The type of `**arguments`: `EngineArgs` without `model`. A test keeps the two in sync."""

    dtype: DType
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    kv_cache_memory: int | str | None
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
    revision: str | None
    token: str | None
    cache_dir: str | os.PathLike[str] | None
    hf_overrides: Mapping[str, Any] | None
    quantization: Quantization | None
    speculative_config: Mapping[str, Any] | None
    chat_template: str | os.PathLike[str] | None
    fit_memory: bool
    kv_events_config: Mapping[str, Any] | None
    kv_transfer_config: Mapping[str, Any] | None
    additional_config: Mapping[str, Any] | None


@functools.cache
def argument_infos() -> Mapping[str, ArgumentInfo]:
    """Each argument's information, in the order of `EngineArgs`."""
    return {argument.name: argument.metadata["info"] for argument in fields(EngineArgs)}


@functools.cache
def argument_types() -> Mapping[str, Any]:
    """Each argument's type."""
    return get_type_hints(EngineArgs)


def shows_engine_arguments(function: Function) -> Function:
    """Lists the engine's arguments in the signature of a function that takes them as `**arguments`, for `help`."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters += [
        inspect.Parameter(a.name, inspect.Parameter.KEYWORD_ONLY, default=a.default, annotation=a.type)
        for a in fields(EngineArgs)
        if a.name not in signature.parameters
    ]
    vars(function)["__signature__"] = signature.replace(parameters=parameters)
    return function
