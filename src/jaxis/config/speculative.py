"""Speculative decoding as a user asks for it: `speculative_config`, under vLLM's names."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxis.config.argument_keys import check_keys
from jaxis.errors import ConfigError

# Methods whose drafts layers on the devices make.
LAYER_METHODS = ("mtp", "eagle3", "draft_model")
# Methods among those whose layers have a separate checkpoint.
_METHODS_WITH_MODEL = ("eagle3", "draft_model")
METHODS = ("ngram", "suffix", *LAYER_METHODS)
# vLLM's names of "mtp" by family.
_MTP_FAMILIES = (
    *("deepseek", "deepseek_v4", "glm4_moe", "glm4_moe_lite", "glm5_next", "hy_v4", "mimo", "mimo_v2", "nemotron_h"),
    *("qwen3_5", "qwen3_next", "qwen4_exp", "step3p5"),
)
METHOD_ALIASES = {f"{family}_mtp": "mtp" for family in _MTP_FAMILIES} | {"dspark": "mtp"}
# Together with the token before them, a step of 16 rows: a size that kernels are compiled for.
DEFAULT_MAX_DRAFTS = 15
# Drafts by layers, which compute so many in any case, one after the other.
DEFAULT_LAYER_DRAFTS = 3
# The published layers compute so many at once.
_DEFAULT_DSPARK_DRAFTS = 5
DEFAULT_LOOKUP_MIN, DEFAULT_LOOKUP_MAX = 3, 16


@dataclass(frozen=True)
class SpeculativeConfig:
    """Configuration of guessed tokens; no value changes an answer.

    Attributes:
      method: "ngram": as the text went on before. "suffix": also as finished outputs of the same `cache_salt` did.
        "mtp", "dspark": with the layers of the checkpoint that predict later tokens. "eagle3": with an EAGLE-3 head.
        "draft_model": with another model of the same vocabulary.
      num_speculative_tokens: Maximum number of tokens to guess ahead for a sequence in a step; the number that pays is
        measured. 0: none are guessed, whatever else is given.
      num_speculative_tokens_per_batch_size: Maximum by the number of running sequences: (first number, last number,
        tokens), in ascending order. Numbers between two entries, and beyond the last, are as those before. Empty: the
        number makes no difference.
      model: Folder or hub id of the head for "eagle3", and of the other model for "draft_model".
      revision: Branch, tag or commit of that hub id; None is the main branch.
      draft_tensor_parallel_size: Devices that share it: None, or the model's `tensor_parallel_size`.
      quantization: Quantization of its weights while loading; None: as the model's.
      prompt_lookup_min: Minimum number of tokens at the text's end that must have occurred before, for "ngram".
      prompt_lookup_max: Maximum number of tokens that are looked for; at least `prompt_lookup_min`.
      suffix_decoding_max_tree_depth: Same as `prompt_lookup_max`, for "suffix".
      suffix_decoding_max_cached_requests: Finished outputs that are kept of each `cache_salt`; 0: none.
      suffix_decoding_max_spec_factor: Tokens to guess for each that matches.
      suffix_decoding_min_token_prob: Minimum probability of a guess, by counts.
    """

    method: str
    num_speculative_tokens: int = DEFAULT_MAX_DRAFTS
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    model: str | None = None
    revision: str | None = None
    draft_tensor_parallel_size: int | None = None
    quantization: str | None = None
    prompt_lookup_min: int = DEFAULT_LOOKUP_MIN
    prompt_lookup_max: int = DEFAULT_LOOKUP_MAX
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    def most_drafts(self, num_running: int) -> int:
        """Returns the maximum number of tokens to guess for a sequence while `num_running` run."""
        most = self.num_speculative_tokens
        for first, _, num_tokens in self.num_speculative_tokens_per_batch_size:
            if first <= num_running:
                most = min(num_tokens, self.num_speculative_tokens)
        return most


# Nothing is loaded that would draft.
NO_SPECULATION = SpeculativeConfig("ngram", num_speculative_tokens=0)
_BY_BATCH_SIZE = "num_speculative_tokens_per_batch_size"
# The least value of each number, and the greatest.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "num_speculative_tokens": (0, 255),
    "prompt_lookup_min": (1, 1024),
    "prompt_lookup_max": (1, 1024),
    "suffix_decoding_max_tree_depth": (2, 1024),
    "suffix_decoding_max_cached_requests": (0, 1_000_000),
    "suffix_decoding_max_spec_factor": (0, 1024),
    "suffix_decoding_min_token_prob": (0, 1),
}


def parse_speculative_config(given: Mapping[str, Any] | None) -> SpeculativeConfig | None:
    """Checks the configuration; None if there is none, so that the engine's default holds.

    Without a method, `num_speculative_tokens=0` is enough: nothing is guessed. Raises ConfigError if a key is unknown,
    or a value out of range.
    """
    if given is None:
        return None
    check_keys("speculative_config", given, [field.name for field in dataclasses.fields(SpeculativeConfig)])
    values = {str(key): value for key, value in given.items() if value is not None}
    if values.get("num_speculative_tokens") == 0:
        values.setdefault("method", "ngram")
    default = _DEFAULT_DSPARK_DRAFTS if values.get("method") == "dspark" else DEFAULT_LAYER_DRAFTS
    method = values["method"] = METHOD_ALIASES.get(str(values.get("method")), values.get("method"))
    if method not in METHODS:
        raise ConfigError(f"speculative_config: method={method!r} is not implemented: give {' or '.join(METHODS)}")
    for name, (low, high) in _BOUNDS.items():
        _check(name, values, low, high)
    if _BY_BATCH_SIZE in values:
        values[_BY_BATCH_SIZE] = by_size = _by_batch_size(values[_BY_BATCH_SIZE])
        values.setdefault("num_speculative_tokens", max(1, *(most for _, _, most in by_size)))
    elif method in LAYER_METHODS:
        values.setdefault("num_speculative_tokens", default)
    _check_model(method, values)
    _complete_lookup_range(values)
    if values.get("num_speculative_tokens") == 0:
        return NO_SPECULATION
    return SpeculativeConfig(**values)


def _complete_lookup_range(values: dict[str, Any]) -> None:
    """Moves the other end of the range, if only one is given and it must move."""
    low, high = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
    if low is None and high is not None:
        values["prompt_lookup_min"] = min(DEFAULT_LOOKUP_MIN, high)
    if high is None and low is not None:
        values["prompt_lookup_max"] = max(DEFAULT_LOOKUP_MAX, low)
    if low is not None and high is not None and low > high:
        raise ConfigError(f"speculative_config: prompt_lookup_min={low} must not exceed prompt_lookup_max={high}")


def _check_model(method: str, values: Mapping[str, Any]) -> None:
    """Raises an error if the keys of a checkpoint to draft with do not fit the method."""
    is_needed = method in _METHODS_WITH_MODEL
    if is_needed and "model" not in values:
        raise ConfigError(f'speculative_config: method={method!r} needs "model", the folder or hub id of what drafts')
    for name in ("model", "revision", "quantization"):
        if name in values and not is_needed:
            raise ConfigError(
                f"speculative_config: {name}={values[name]!r} has no use for method={method!r}: leave it out"
            )
        if name in values and not isinstance(values[name], str):
            raise ConfigError(f"speculative_config: {name}={values[name]!r} must be a string")


def _by_batch_size(given: Any) -> tuple[tuple[int, int, int], ...]:
    """Checks `num_speculative_tokens_per_batch_size`, by vLLM's rules."""
    entries = [tuple(entry) for entry in given] if _is_list_of_lists(given) else []
    _, most = _BOUNDS["num_speculative_tokens"]
    is_valid = bool(entries) and all(
        len(entry) == 3
        and all(isinstance(value, int) and not isinstance(value, bool) for value in entry)
        and 1 <= entry[0] <= entry[1]
        and 0 <= entry[2] <= most
        for entry in entries
    )
    entries.sort()
    follows = all(before[1] < after[0] for before, after in itertools.pairwise(entries)) if is_valid else False
    if not follows or entries[0][0] != 1:
        raise ConfigError(
            f"speculative_config: {_BY_BATCH_SIZE}={given!r} must be a list such as [[1, 4, 7], [5, 16, 3]]: from "
            f"so many sequences to so many, at most so many tokens (0 to {most}); the first from 1, and none twice"
        )
    return tuple(entries)


def _is_list_of_lists(given: Any) -> bool:
    return isinstance(given, list | tuple) and all(isinstance(entry, list | tuple) for entry in given)


def _check(name: str, values: Mapping[str, Any], low: float, high: float) -> None:
    if name not in values:
        return
    value, is_integer = values[name], isinstance(getattr(SpeculativeConfig, name), int)
    if isinstance(value, bool) or not isinstance(value, int if is_integer else int | float) or not low <= value <= high:
        kind = "an integer" if is_integer else "a number"
        raise ConfigError(f"speculative_config: {name}={value!r} must be {kind} from {low} to {high}")
