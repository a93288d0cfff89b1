"""Compares two configs of one model, as jaxis reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxis.bringup.analyze.construction import construct
from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config
from jaxis.layers.rope import LongRotaryEmbedding, make_rotary_embedding

# Compared in another way, or of no effect on logits.
_NOT_COMPARED = {
    *("architectures", "model_type", "dtype", "torch_dtype", "vocab_size", "tie_word_embeddings", "head_dim"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_local_base_freq"),
    *("original_max_position_embeddings", "layer_types", "quantization_config", "num_nextn_predict_layers"),
    *("moe_layers", "no_rope_layers"),  # `model_keys` checks them
}
_OTHER_NAMES = {"num_local_experts": "num_experts"}


def first_difference(original: HFConfig, other: Mapping[str, Any], source: str) -> str | None:
    """Returns the first key, with both values, in which two text models' configs differ; None if there is none.

    Raises ConfigError if jaxis refuses `other`.
    """
    there = HFConfig(other, source=source)
    # The config of a multimodal checkpoint's text model does not name its class.
    here = HFConfig({"architectures": other["architectures"], **original.to_dict()}, source=original.source)
    ours, theirs = _used(here), _used(there)
    for key in sorted(ours.keys() | theirs.keys()):
        if not _equal(ours.get(key), theirs.get(key)):
            return f"{key} is {ours.get(key)!r} (read back: {theirs.get(key)!r})"
    return _rope_difference(here, there)


def _used(config: HFConfig) -> dict[str, Any]:
    """Returns the settings that the model reads, with its defaults for missing ones; without nulls."""
    uses = construct(config.to_dict(), config.source).uses
    return {
        _OTHER_NAMES.get(use.key, use.key): use.value
        for use in uses
        if use.use == "used" and use.value is not None and use.key.partition(".")[0] not in _NOT_COMPARED
    }


def _equal(here: object, back: object) -> bool:
    if isinstance(here, float) and isinstance(back, float | int):
        return bool(np.float32(here) == np.float32(back)) or bool(np.isclose(here, back, rtol=1e-6))
    return here == back


def _rope_difference(original: HFConfig, other: HFConfig) -> str | None:
    kinds = [_layer_types(config) for config in (original, other)]
    if "layer_types" in original and kinds[0] != kinds[1]:
        return f"layer_types is {kinds[0]} (read back: {kinds[1]})"
    has_two = any(_has_two_ropes(config) for config in (original, other))
    for kind in dict.fromkeys(kinds[1]) if has_two else [None]:
        here, back = (_frequencies(config, kind) for config in (original, other))
        if len(here) != len(back) or not np.allclose(here, back, rtol=1e-5):
            return f"the rope is {rope_config(original, kind)} (read back: {rope_config(other, kind)})"
    return None


def _has_two_ropes(config: HFConfig) -> bool:
    return "rope_local_base_freq" in config or "sliding_attention" in (config.read_object("rope_parameters") or {})


def _layer_types(config: HFConfig) -> list[str]:
    """Returns each layer's type, if they differ."""
    kinds = list(config.get("layer_types") or [])
    # `model_keys` checks the order of layers with chunks.
    return kinds if len(set(kinds)) > 1 and "chunked_attention" not in kinds else []


def _frequencies(config: HFConfig, kind: str | None) -> np.ndarray:
    """Returns frequencies for short sequences, for long ones, and the attention's scale."""
    head_dim = config.get("qk_rope_head_dim") or config.get("head_dim")
    head_dim = head_dim or config["hidden_size"] // config["num_attention_heads"]
    context = config["max_position_embeddings"]
    rope = make_rotary_embedding(rope_config(config, kind), head_dim=head_dim, max_model_len=context)
    long = rope.long_inv_freq if isinstance(rope, LongRotaryEmbedding) else rope.inv_freq
    return np.array([*rope.inv_freq, *long, rope.attention_scaling])
