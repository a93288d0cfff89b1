"""Configs of Gemma 3n and Gemma 4 from the keys of GGUF files.

Source: llama.cpp's `src/models/gemma3n.cpp` and `gemma4.cpp`, and its converters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from jaxis.errors import ConfigError
from jaxis.loading.gguf.config_reader import FULL, ConfigReader, Values
from jaxis.loading.gguf.names import ROPE_FREQS

_UNROTATED = 1e29  # the least divisor of frequencies that stand for none


def _gemma3n(reader: ConfigReader) -> Values:
    """Gemma 3n. llama.cpp takes its sparse layers, rank and soft cap from the model or from the weights."""
    keys = reader.keys
    listed = keys.for_layers("activation_sparsity_scale", reader.num_layers)
    if listed is None:
        raise ConfigError(
            f"{keys.source} lacks the key {keys.architecture}.activation_sparsity_scale: use another file"
        )
    return {
        **_gemma(reader, "Gemma3nForCausalLM", "gemma3n_text"),
        **_two_ropes(reader, {"rope_type": "default"}),
        "intermediate_size": _of_layers(reader, "feed_forward_length"),
        # The file has how many standard deviations above the mean a gate must be.
        "activation_sparsity_pattern": [_share_below(scale) for scale in listed],
        "altup_num_inputs": keys.integer("altup.num_inputs"),
        "altup_active_idx": keys.integer("altup.active_idx", 0),
        "laurel_rank": _rows(reader, "blk.0.laurel_l.weight"),
        "final_logit_softcapping": keys.get_or_assume("final_logit_softcapping", "final_logit_softcapping", 30.0),
        "num_kv_shared_layers": keys.integer("attention.shared_kv_layers"),
    }


def _share_below(scale: float) -> float:
    return 0.0 if scale == -np.inf else round(NormalDist().cdf(scale), 6)


def _gemma4(reader: ConfigReader) -> Values:
    """Gemma 4, whose full layers have heads and ropes of their own."""
    keys = reader.keys
    global_head_dim, head_dim = reader.head_dim, keys.integer("attention.key_length_swa")
    keys.expect("attention.value_length_swa", head_dim)
    keys.expect("rope.dimension_count", global_head_dim)
    keys.expect("rope.dimension_count_swa", head_dim)
    kinds = reader.layer_types(full_every=6)
    num_shared = keys.integer("attention.shared_kv_layers", 0)
    full_rope = {"rope_type": "proportional", "partial_rotary_factor": _rotated_part(reader)}
    sizes = _of_layers(reader, "feed_forward_length")
    values = {
        **_gemma(reader, "Gemma4ForCausalLM", "gemma4_text", kv_heads_differ=True),
        **_two_ropes(reader, full_rope),
        **_kv_heads(reader, kinds),
        "head_dim": head_dim,
        "global_head_dim": global_head_dim,
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] == 2 * sizes[0],
        "num_kv_shared_layers": num_shared,
        "attention_bias": reader.has_tensors("attn_q.bias"),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }
    if num_experts := keys.integer("expert_count", 0):
        keys.expect("expert_weights_scale", 1.0)
        values |= {
            "enable_moe_block": True,
            "num_experts": num_experts,
            "top_k_experts": keys.integer("expert_used_count"),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        }
    else:
        keys.ignore("expert_feed_forward_length")
    return values


def _gemma(reader: ConfigReader, architecture: str, model_type: str, *, kv_heads_differ: bool = False) -> Values:
    """Returns the values of both families: a window, and embeddings for each layer (of size 0: none)."""
    keys = reader.keys
    size = keys.integer("embedding_length_per_layer_input", 0)
    of_layers = {"vocab_size_per_layer_input": _rows(reader, "per_layer_token_embd.weight")} if size else {}
    return {
        **reader.base(architecture, model_type, kv_heads_differ=kv_heads_differ),
        **reader.rms(),
        **of_layers,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": reader.window(512),
        "layer_types": reader.layer_types(full_every=6),
        "hidden_size_per_layer_input": size,
    }


def _two_ropes(reader: ConfigReader, full: Values) -> Values:
    keys = reader.keys
    theta = float(keys.get("rope.freq_base", 1_000_000.0))
    local = float(keys.get_or_assume("rope.freq_base_swa", "rope_local_base_freq", 10_000.0))
    keys.expect("rope.scaling.type", "none", "linear")
    keys.expect("rope.scaling.factor", 1.0, 0.0)
    local_rope = {"rope_type": "default", "rope_theta": local}
    return {"rope_parameters": {FULL: {**full, "rope_theta": theta}, "sliding_attention": local_rope}}


def _rotated_part(reader: ConfigReader) -> float:
    """Returns the part of a full layer's frequencies that rotate; the others' divisors are practically infinite."""
    divisors = reader.read_tensor(ROPE_FREQS)
    if divisors is None:
        return 1.0
    count = int((divisors == 1).sum())
    if not (divisors[:count] == 1).all() or not (divisors[count:] >= _UNROTATED).all():
        raise ConfigError(f"{reader.keys.source} has a rope that jaxis does not know in this architecture (rope_freqs)")
    return count / len(divisors)


def _kv_heads(reader: ConfigReader, kinds: list[str]) -> Values:
    """Returns key-value heads by kind of layer, and whether full layers use keys as values."""
    tensors = reader.keys.tensors
    same = any(
        f"blk.{i}.attn_k.weight" in tensors and f"blk.{i}.attn_v.weight" not in tensors
        for i, kind in enumerate(kinds)
        if kind == FULL
    )
    listed = reader.kv_heads_of_layers or [reader.num_kv_heads] * reader.num_layers
    of_kind = {kind: {heads for each, heads in zip(kinds, listed, strict=True) if each == kind} for kind in set(kinds)}
    if any(len(heads) > 1 for heads in of_kind.values()):
        raise ConfigError(f"{reader.keys.source} has {listed} key-value heads, which differ in layers of one kind")
    found = {kind: heads.pop() for kind, heads in of_kind.items()}
    full = found.get(FULL, reader.num_kv_heads)
    local = found.get("sliding_attention", full)
    if full != local and not same:
        raise ConfigError(
            f"{reader.keys.source} has {full} key-value heads in full layers and {local} in others, which is "
            "supported only where values are keys"
        )
    return {"num_key_value_heads": local, "num_global_key_value_heads": full, "attention_k_eq_v": same}


def _of_layers(reader: ConfigReader, key: str) -> list[Any]:
    listed = reader.keys.for_layers(key, reader.num_layers)
    return [reader.keys.integer(key)] * reader.num_layers if listed is None else listed


def _rows(reader: ConfigReader, name: str) -> int:
    tensor = reader.keys.tensors.get(name)
    if tensor is None:
        raise ConfigError(f"{reader.keys.source} has no tensor {name!r}: use another file of the model")
    return tensor.shape[0]


GEMMAS: Mapping[str, Callable[[ConfigReader], Values]] = {"gemma3n": _gemma3n, "gemma4": _gemma4}
"""Readers by `general.architecture`."""
