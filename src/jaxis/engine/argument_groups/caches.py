"""Arguments of the sizes of an engine: its context, its steps and its KV cache."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from jaxis.engine.argument_groups.combinations import EngineFeature
from jaxis.engine.argument_groups.info import ArgumentGroup, argument
from jaxis.errors import ConfigError
from jaxis.host.byte_size import parse_bytes

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "float32", "bfloat16", "float16", "int8"]


@dataclass(frozen=True)
class CacheArguments(ArgumentGroup):
    """The model, the types of its values, and how much runs at once."""

    model: str | None = argument(
        None,
        in_fingerprint=False,
        description=(
            "Folder of a checkpoint in Hugging Face format, a GGUF file, or a Hub id (`org/name:Q4_K_M` is a GGUF "
            "file there); None is the embedded demonstration model."
        ),
    )
    dtype: DType = argument(
        "auto",
        description=(
            'Type of weights and activations; "auto" is the checkpoint\'s on GPU and TPU and float32 on CPU, where '
            "few processors are faster with low-precision types. See [data types](loading.md#data-types)."
        ),
        metavar="TYPE",
        help="Of weights and activations: auto, float32, bfloat16 or float16.",
    )
    max_model_len: int | None = argument(
        None,
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
    )
    max_num_seqs: int | None = argument(
        None,
        description="Most sequences that run at once, on each data rank; None is 64.",
        documented_default="64",
        minimum=1,
        metavar="NUMBER",
        help="Most completions that run at once, on each data rank.",
        speed_only=True,
    )
    max_num_batched_tokens: int | None = argument(
        None,
        description=(
            "Most tokens of a step, on each data rank; longer prompts are processed in chunks. None is 512 on CPU "
            "and 2048 elsewhere."
        ),
        documented_default="512 on CPU, 2048 elsewhere",
        minimum=1,
        metavar="TOKENS",
        help="Most tokens of a step, on each data rank; longer prompts are processed in chunks.",
        speed_only=True,
    )
    kv_cache_memory: int | str | None = argument(
        None,
        description='Bytes for the KV cache, or a size such as "2GiB"; None sizes it from the free memory.',
        documented_default="from the free memory",
        metavar="SIZE",
        help="Memory for the KV cache, in bytes or as 2GiB (default: from the free memory).",
        speed_only=True,
    )
    gpu_memory_utilization: float | None = argument(
        None,
        description=(
            "Share of each GPU's memory that is taken; None is 0.9, unless `XLA_CLIENT_MEM_FRACTION` in the "
            "environment says otherwise. No effect on CPU and TPU, or once JAX has looked for devices in the "
            "process."
        ),
        documented_default="0.9",
        metavar="SHARE",
        help="Of each GPU's memory, the share that is used (default: 0.9).",
        speed_only=True,
    )
    enable_prefix_caching: bool = argument(
        True,
        description="Compute equal prompt prefixes only once.",
        config="CacheConfig",
        option="prefix_caching",
        help="Compute equal beginnings of prompts once.",
        speed_only=True,
    )
    block_size: int = argument(
        16,
        description="Tokens of a KV cache block.",
        config="CacheConfig",
        minimum=1,
        speed_only=True,
    )
    kv_cache_dtype: KVCacheDType = argument(
        "auto",
        description=(
            'Type of cached keys and values; "int8" has a float32 scale for each token and head. "auto" is '
            '`dtype`; but on CPU, if that is "auto" too, it is bfloat16 for a checkpoint in bfloat16, and if it '
            'is "float16", it is float32, because the native kernels have no float16 cache. See [data '
            "types](loading.md#data-types)."
        ),
        metavar="TYPE",
        help="Of cached keys and values: one of these, or int8.",
    )

    def check(self) -> None:
        share = self.gpu_memory_utilization
        if share is not None and (isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1):
            raise ConfigError(f"gpu_memory_utilization={share!r} must be a number above 0, and at most 1")
        _ = self.kv_cache_memory_bytes

    def features(self) -> dict[EngineFeature, tuple[bool, str]]:
        return {EngineFeature.NO_PREFIX_CACHE: (not self.enable_prefix_caching, "enable_prefix_caching=False")}

    @functools.cached_property
    def kv_cache_memory_bytes(self) -> int | None:
        """`kv_cache_memory` in bytes."""
        return None if self.kv_cache_memory is None else parse_bytes(self.kv_cache_memory, "kv_cache_memory")
