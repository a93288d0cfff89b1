"""Granite 3 and 4: Llama with multipliers, experts and Mamba2 layers."""

from __future__ import annotations

from jaxis.loading.gguf.common_facts import ATTENTION_BIAS, BASE, MLP_BIAS, RMS, experts, usual, windows
from jaxis.loading.gguf.config_reader import ConfigReader, Values
from jaxis.loading.gguf.families.mamba import MAMBA2_OF_HYBRIDS, mamba2_heads, mixer_names
from jaxis.loading.gguf.table import GGUF, Fact, Written, constant, has, key, only, unused
from jaxis.loading.gguf.tensor_names import GateUpOrder, GGUFNames

_MULTIPLIERS = (
    key("embedding_multiplier", "embedding_scale", 1.0, float),
    key("residual_multiplier", "residual_scale", 1.0, float),
    key("attention_multiplier", "attention.scale", lambda reader: reader.head_dim**-0.5, float),
    key("logits_scaling", "logit_scale", kind=float),
)
_EXPERTS = experts("num_local_experts")
_HAS_ROPE, _HAS_NONE = (only("rope.scaling.finetuned", has_rope) for has_rope in (True, False))
_SHARED, _GATE_UP = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"), "shared_mlp.gate_up_proj"
_EXPERT_NAMES = dict(zip(_SHARED, (f"{_GATE_UP}[0]", f"{_GATE_UP}[1]", "shared_mlp.down_proj"), strict=True))
_STACK = GateUpOrder(outputs_first=True, gate_up="input_linear.weight", down="output_linear.weight")
_MOE_NAMES = GGUFNames(_EXPERT_NAMES, stack=_STACK, permutes_rope=True)
_HYBRID_NAMES = GGUFNames(
    {
        **_EXPERT_NAMES,
        **{name.removesuffix("_shexp"): target for name, target in _EXPERT_NAMES.items()},
        **mixer_names("mamba", "dt_bias="),
    },
    stack=_STACK,
    permutes_rope=True,
)
_MOE = (_HAS_ROPE, usual(), _MULTIPLIERS, ATTENTION_BIAS, _EXPERTS)


def _hybrid(reader: ConfigReader) -> Values:
    keys = reader.keys
    width = keys.integer("feed_forward_length")
    num_heads, head_dim = mamba2_heads(reader)
    return {
        "intermediate_size": width,
        "shared_intermediate_size": keys.integer("expert_shared_feed_forward_length", 0) or width,
        "layer_types": ["attention" if heads else "mamba" for heads in reader.kv_heads_of_layers or []],
        "mamba_expand": num_heads * head_dim // reader.hidden_size,
    }


def _rope_pattern(reader: ConfigReader) -> Values:
    """Layers without a rope have 0 as its base."""
    pattern, theta = reader.keys.for_layers("attention.rope_pattern", reader.num_layers), reader.values["rope_theta"]
    return {} if pattern is None else {"layer_rope_theta": [theta if each else 0 for each in pattern]}


_HYBRID = (
    [BASE, RMS, _MULTIPLIERS, ATTENTION_BIAS, MAMBA2_OF_HYBRIDS, Fact(_hybrid)],
    [_HAS_NONE, unused("rope.dimension_count", "rope.freq_base", "expert_used_count")],
    constant("position_embedding_type", "nope"),
)
_HYBRID_MODEL = ("granitehybrid", "granitemoehybrid", "GraniteMoeHybridForCausalLM")
GGUFS = (
    GGUF(
        ("granite", "granite", "GraniteForCausalLM"),
        (_HAS_ROPE, usual(), has("attention_bias", "attn_q.bias", "attn_qkv.bias"), MLP_BIAS, _MULTIPLIERS),
        GGUFNames(permutes_rope=True),
        written=Written(biases=True),
    ),
    GGUF(
        ("granite_swa", "granite_swa", "GraniteSWAForCausalLM"),
        (usual(), has("attention_bias", "attn_q.bias"), MLP_BIAS, _MULTIPLIERS, windows(4, 128), Fact(_rope_pattern)),
        GGUFNames({"attn_sinks": "self_attn.sinks="}, permutes_rope=True),
    ),
    GGUF(
        ("granitemoe", "granitemoeshared", "GraniteMoeSharedForCausalLM"),
        (_MOE, key("shared_intermediate_size", "expert_shared_feed_forward_length")),
        _MOE_NAMES,
        when="expert_shared_feed_forward_length",
    ),
    GGUF(("granitemoe", "granitemoe", "GraniteMoeForCausalLM"), _MOE, _MOE_NAMES),
    # Bamba's files, whose attention has a rope, are not supported.
    GGUF(_HYBRID_MODEL, (_HYBRID, _EXPERTS), _HYBRID_NAMES, when="expert_count"),
    GGUF(_HYBRID_MODEL, (_HYBRID, constant("num_local_experts", 0)), _HYBRID_NAMES),
)
