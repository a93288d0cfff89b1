"""Arguments of the checkpoint and of what is read from it."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxis.engine.argument_groups.info import ArgumentGroup, argument
from jaxis.errors import ConfigError
from jaxis.host.byte_size import parse_bytes
from jaxis.sampling_params import LogprobsMode

LoadFormat = Literal["auto", "dummy"]
Quantization = str | os.PathLike[str] | Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True)
class LoadingArguments(ArgumentGroup):
    """Source of the weights and settings, and changes to them."""

    load_format: LoadFormat = argument(
        "auto",
        description='"auto" reads the checkpoint\'s weights; "dummy" makes random ones.',
        config="LoadConfig",
        help="Where weights come from; dummy makes random ones.",
    )
    seed: int = argument(
        0,
        description="Seed of requests that bring none, and of random weights.",
        config="ModelConfig",
    )
    logprobs_mode: LogprobsMode = argument(
        "raw_logprobs",
        description=(
            "Meaning of log-probabilities, unless a request says: see `SamplingParams` and [scores and "
            "rollouts](rl.md#what-a-log-probability-means)."
        ),
        config="ModelConfig",
        metavar="MODE",
        help="What a log-probability is, unless a request says: raw_logprobs, processed_logprobs (after "
        "temperature and filters), raw_logits or processed_logits.",
        panel="Scores",
    )
    enable_return_routed_experts: bool = argument(
        False,
        description=(
            "Return the experts of each token, unless a request says: see `SamplingParams` and [scores and "
            "rollouts](rl.md#which-experts-a-token-went-to)."
        ),
        config="ModelConfig",
        help="Return which experts each token went to, unless a request says.",
        panel="Scores",
    )
    revision: str | None = argument(
        None,
        description="Branch, tag or commit of a Hub id; None is the main branch.",
        metavar="NAME",
        help="Branch, tag or commit on the hub (default: main).",
    )
    token: str | None = argument(None, in_fingerprint=False, description="Access token of the hub.", speed_only=True)
    cache_dir: str | os.PathLike[str] | None = argument(
        None, in_fingerprint=False, description="Folder for downloads from the hub.", speed_only=True
    )
    hf_overrides: Mapping[str, Any] | None = argument(
        None,
        description="Keys of config.json to set; None as a value removes the key.",
        metavar="JSON",
        help="Keys of config.json to set, such as '{\"rope_theta\": 1e6}'.",
    )
    quantization: Quantization | None = argument(
        None,
        description=(
            'Low-precision weights, made while loading: "int8", "int4", a list of rules, or the path of a YAML or '
            'JSON file with rules. Or, for a quantized checkpoint, "int8_activations": int8 products with its '
            'weights; or "dequantize": its weights in `dtype`. See [quantization](quantization.md).'
        ),
        metavar="NAME|FILE",
        help="Low-precision weights: int8, int4, or a YAML or JSON file with rules; dequantize: a quantized "
        "model's weights in full precision.",
    )
    chat_template: str | os.PathLike[str] | None = argument(
        None,
        description=(
            "Template of conversations in place of the checkpoint's: the name of one that jaxis brings (chatml, "
            "deepseek-v4, deepseek-v4.1, gemma, kimi-k3, llama2, llama3, mistral, mistral-v7, phi3, zephyr), a "
            "file, or Jinja source. See [chat templates](loading.md#chat-templates)."
        ),
    )
    fit_memory: bool = argument(
        False,
        in_fingerprint=False,
        description=(
            "Choose the width of the weights and the length of the context by what fits into the free memory, "
            "unless they are given, and say so. `jaxis serve` does. See [memory](loading.md#memory)."
        ),
    )

    pack_cache: bool = argument(
        False,
        in_fingerprint=False,
        description=(
            "Keep the weights as the CPU kernels read them, so that later starts map them. See [packed "
            "folders](loading.md#packed-folders)."
        ),
        help="Keep the weights as the CPU kernels read them, so that later starts map them.",
        speed_only=True,
    )
    pack_cache_size: int | str = argument(
        "50GiB",
        in_fingerprint=False,
        description=('Most bytes of all models kept so, or a size such as "200GiB"; the least recently used go.'),
        metavar="SIZE",
        help="Most bytes of all models kept so, such as 200GiB.",
        speed_only=True,
    )

    def check(self) -> None:
        _ = self.pack_cache_bytes
        if self.pack_cache and self.load_format == "dummy":
            raise ConfigError("pack_cache keeps the weights of a checkpoint: leave out load_format='dummy'")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed={self.seed!r} must be an integer")
        if self.hf_overrides is not None and not isinstance(self.hf_overrides, Mapping):
            raise ConfigError(f"hf_overrides={self.hf_overrides!r} must be a dict of keys of config.json")

    @functools.cached_property
    def pack_cache_bytes(self) -> int:
        """`pack_cache_size` in bytes."""
        return parse_bytes(self.pack_cache_size, "pack_cache_size")
