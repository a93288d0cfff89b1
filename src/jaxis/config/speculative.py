"""Speculative decoding as a user asks for it: `speculative_config`, under vLLM's names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxis.errors import ConfigError

# Methods whose drafts layers on the devices make.
LAYER_METHODS = ("mtp", "eagle3", "draft_model")
METHODS = ("ngram", "suffix", *LAYER_METHODS)
# vLLM's names of "mtp" by family.
_MTP_FAMILIES = ("deepseek", "glm4_moe", "glm4_moe_lite", "mellum", "qwen3_5", "qwen3_5_moe", "qwen3_next")
METHOD_ALIASES = {f"{family}_mtp": "mtp" for family in _MTP_FAMILIES}
# Together with the token before them, a step of 16 rows: a size that kernels are compiled for.
DEFAULT_MAX_DRAFTS = 15
# By layers, which compute so many in any case.
DEFAULT_LAYER_DRAFTS = 3
DEFAULT_LOOKUP_MIN, DEFAULT_LOOKUP_MAX = 3, 16


@dataclass(frozen=True)
class SpeculativeConfig:
    """How next tokens are guessed; no value changes an answer.

    Attributes:
      method: "ngram": as the text went on before. "suffix": also as finished outputs of the same `cache_salt` did.
        "mtp": with the layer of the checkpoint that predicts later tokens. "eagle3": with an EAGLE-3 head.
        "draft_model": with another model of the same vocabulary.
      num_speculative_tokens: Most tokens to guess ahead for a sequence in a step; how many pay is measured.
      model: Folder or hub id of the head for "eagle3", and of the other model for "draft_model".
      revision: Branch, tag or commit of that hub id; None is the main branch.
      quantization: How its weights are quantized while loading; None: as the model's.
      prompt_lookup_min: Fewest tokens at the text's end that must have occurred before, for "ngram".
      prompt_lookup_max: Most tokens that are looked for; at least `prompt_lookup_min`.
      suffix_decoding_max_tree_depth: The same for "suffix".
      suffix_decoding_max_cached_requests: Finished outputs that are kept of each `cache_salt`; 0: none.
      suffix_decoding_max_spec_factor: Tokens to guess for each that matches.
      suffix_decoding_min_token_prob: Least probability of a guess, by counts.
    """

    method: str
    num_speculative_tokens: int = DEFAULT_MAX_DRAFTS
    model: str | None = None
    revision: str | None = None
    quantization: str | None = None
    prompt_lookup_min: int = DEFAULT_LOOKUP_MIN
    prompt_lookup_max: int = DEFAULT_LOOKUP_MAX
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1


# The least value of each number, and the greatest.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "num_speculative_tokens": (1, 255),
    "prompt_lookup_min": (1, 1024),
    "prompt_lookup_max": (1, 1024),
    "suffix_decoding_max_tree_depth": (2, 1024),
    "suffix_decoding_max_cached_requests": (0, 1_000_000),
    "suffix_decoding_max_spec_factor": (0, 1024),
    "suffix_decoding_min_token_prob": (0, 1),
}


def parse_speculative_config(given: Mapping[str, Any] | None) -> SpeculativeConfig | None:
    """The checked configuration; None if there is none.

    Raises:
      ConfigError: A key is unknown, or a value out of range.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(f'speculative_config={given!r} must be an object such as {{"method": "ngram"}}')
    keys = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    values = {str(key): value for key, value in given.items() if value is not None}
    method = values["method"] = METHOD_ALIASES.get(str(values.get("method")), values.get("method"))
    if method not in METHODS:
        raise ConfigError(f"speculative_config: method={method!r} is not implemented: give {' or '.join(METHODS)}")
    if unknown := sorted(values.keys() - keys):
        raise ConfigError(
            f"speculative_config: unknown key {', '.join(unknown)}: leave it out; known are {', '.join(sorted(keys))}"
        )
    for name, (low, high) in _BOUNDS.items():
        _check(name, values, low, high)
    if method in LAYER_METHODS:
        values.setdefault("num_speculative_tokens", DEFAULT_LAYER_DRAFTS)
    _check_model(method, values)
    low, high = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    if low is None and high is not None:
        values["prompt_lookup_min"] = min(DEFAULT_LOOKUP_MIN, high)
    if high is None and low is not None:
        values["prompt_lookup_max"] = max(DEFAULT_LOOKUP_MAX, low)
    config = SpeculativeConfig(**values)
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min={config.prompt_lookup_min} must not exceed "
            f"prompt_lookup_max={config.prompt_lookup_max}"
        )
    return config


def _check_model(method: str, values: Mapping[str, Any]) -> None:
    """Raises an error if the keys of a checkpoint to draft with are not as the method needs them."""
    is_needed = method in ("eagle3", "draft_model")
    if is_needed and "model" not in values:
        raise ConfigError(f'speculative_config: method={method!r} needs "model", the folder or hub id of what drafts')
    for name in ("model", "revision", "quantization"):
        if name in values and not is_needed:
            raise ConfigError(
                f"speculative_config: {name}={values[name]!r} has no use for method={method!r}: leave it out"
            )
        if name in values and not isinstance(values[name], str):
            raise ConfigError(f"speculative_config: {name}={values[name]!r} must be a string")


def _check(name: str, values: Mapping[str, Any], low: float, high: float) -> None:
    if name not in values:
        return
    value, is_integer = values[name], isinstance(getattr(SpeculativeConfig, name), int)
    if isinstance(value, bool) or not isinstance(value, int if is_integer else int | float) or not low <= value <= high:
        kind = "an integer" if is_integer else "a number"
        raise ConfigError(f"speculative_config: {name}={value!r} must be {kind} from {low} to {high}")
