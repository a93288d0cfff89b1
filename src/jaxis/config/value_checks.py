"""Checks of the values in a config.json, which may be anybody's, before anything is computed from them."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from jaxis.config.hf_config import HFConfig
from jaxis.config.reference import FamilyReference, model_types_of, reference_of
from jaxis.errors import ConfigError

# Key -> the least and the largest value: 0 where it may stand for a part that a model does not have. The largest are
# some ten times those of any published model; a model of more takes hours to find out that its weights do not fit.
_MAX_WIDTH = 2**24
_MAX_HEADS = 2**16  # and elements of a head
_INTEGERS: Mapping[str, tuple[int, int]] = {
    "num_hidden_layers": (1, 1024),
    **dict.fromkeys(("vocab_size", "hidden_size", "kv_lora_rank", "decoder_sparse_step"), (1, _MAX_WIDTH)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), (1, _MAX_HEADS)),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), (1, _MAX_HEADS)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "intermediate_size_mlp"), (0, _MAX_WIDTH)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), (0, 2**16)),
    "max_position_embeddings": (1, 2**31 - 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), (0, 2**31 - 1)),
}
# Keys that may be 0 beside sizes of latent attention: of heads without a rope.
_OF_ROTATED = ("head_dim", "qk_rope_head_dim")
# Types of keys for which the reference assumes no value that would tell them.
_NUMBERS = (
    *("rope_theta", "rope_local_base_freq", "partial_rotary_factor", "query_pre_attn_scalar"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)
_OBJECTS = ("rope_scaling", "rope_parameters", "text_config", "quantization_config")
_TYPES: Mapping[str, type] = {
    **dict.fromkeys(_NUMBERS, float),
    **dict.fromkeys(_OBJECTS, dict),
    "layer_types": list,
    **dict.fromkeys(("model_type", "dtype", "torch_dtype"), str),
}
# Keys whose values have several types: the code that reads them checks theirs.
_OF_SEVERAL_TYPES = ("sliding_window_pattern", "gating", "moe_topk", "moe_layers_enum")
_OF_EACH_LAYER = ("intermediate_size", "moe_intermediate_size", "rope_theta")
_NAMES: Mapping[type, str] = {
    bool: "true or false",
    float: "a number",
    str: "a string",
    dict: "an object",
    list: "a list",
}
_MAX_STRING_CHARACTERS = 1000


def check_values(config: HFConfig) -> None:
    """Checks a config, and its `text_config` if it has one; does not count as reading.

    Types are those of the values that the reference assumes without the key. A null counts as no value. Raises
    ConfigError if a value is of the wrong type, too small or too large.
    """
    values = config.to_dict()
    _check(values, _reference(values), config.source, "")
    text_config = values.get("text_config")
    if isinstance(text_config, dict):
        _check(text_config, _reference(text_config) or _reference(values), config.source, "text_config.")


def _reference(values: Mapping[str, Any]) -> FamilyReference | None:
    if (reference := reference_of(values.get("model_type"))) is not None:
        return reference
    architectures = values.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    types = [kind for name in names if isinstance(name, str) for kind in model_types_of(name)]
    return reference_of(types[0]) if types else None


def _check(values: Mapping[str, Any], reference: FamilyReference | None, source: str, path: str) -> None:
    defaults = {} if reference is None else reference.defaults
    for key, value in values.items():
        if value == 0 and type(value) is int and key in _OF_ROTATED and "qk_nope_head_dim" in values:
            continue
        expected = None if value is None else _expectation(key, value, defaults.get(key))
        if expected is not None:
            shown = reprlib.repr(value)
            message = f"{source} has {path + key}={shown}, expected {expected}: correct the file"
            raise ConfigError(message, keys=[path + key])


def _expectation(key: str, value: object, default: object) -> str | None:
    """Returns a description of the expected value; None if the value is valid."""
    if key in _OF_SEVERAL_TYPES:
        return None
    if key in _INTEGERS:
        least, most = _INTEGERS[key]
        # Only where the reference has no number for all layers may each layer have its own.
        numbers = value if isinstance(value, list) and default is None and key in _OF_EACH_LAYER else [value]
        if all(type(number) is int and least <= number <= most for number in numbers):
            return None
        return f"an integer of at least {least}" + (f" and at most {most}" if type(value) is int else "")
    if key.endswith("_token_id"):
        ids = value if isinstance(value, list) else [value]
        return None if all(type(token_id) is int for token_id in ids) else "an integer or a list of integers"
    # "auto" stands for a number that follows from other keys, and which may be there instead.
    kind = _TYPES.get(key) or (None if default == "auto" else _kind(default))
    if kind is float and key in _OF_EACH_LAYER and isinstance(value, list) and default is None:
        return None if all(_kind(number) is float and not _is_extreme(number) for number in value) else "numbers"
    if kind is None or (_kind(value) is kind and not _is_extreme(value)):
        return None
    return _NAMES[kind]


def _kind(value: object) -> type | None:
    """Returns a value's type; all numbers have the type float."""
    if isinstance(value, int) and not isinstance(value, bool):
        return float
    return type(value) if type(value) in _NAMES else None


def _is_extreme(value: object) -> bool:
    if isinstance(value, str):
        return len(value) > _MAX_STRING_CHARACTERS
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, int) and abs(value) > 2**63
