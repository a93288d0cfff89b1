"""Configs of later architectures with experts, from the keys of GGUF files.

Source: llama.cpp's `src/models/*.cpp` of these architectures, and its converters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxis.loading.gguf.config_reader import ConfigReader, Values
from jaxis.loading.gguf.names import ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT

_SOFTMAX, _SIGMOID = 1, 2  # of `expert_gating_func`


def _olmoe(reader: ConfigReader) -> Values:
    """OLMoE. By llama.cpp, the weights of experts are not normalised."""
    return {
        **reader.usual("OlmoeForCausalLM", "olmoe"),
        "num_experts": reader.keys.integer("expert_count"),
        "num_experts_per_tok": reader.keys.integer("expert_used_count"),
        "norm_topk_prob": reader.keys.assume("norm_topk_prob", False),
    }


def _qwen2moe(reader: ConfigReader) -> Values:
    """Qwen1.5 and Qwen2 MoE, whose experts have all layers."""
    keys = reader.keys
    return {
        **reader.usual("Qwen2MoeForCausalLM", "qwen2_moe"),
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": keys.assume("norm_topk_prob", False),
    }


def _dots1(reader: ConfigReader) -> Values:
    keys = reader.keys
    keys.expect("expert_gating_func", _SIGMOID)
    return {
        **reader.usual("Dots1ForCausalLM", "dots1"),
        **deepseek_experts(reader),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0),
        **reader.attention_bias(),
        "n_routed_experts": keys.integer("expert_count"),
        "n_shared_experts": keys.integer("expert_shared_count", 0),
        "sliding_window": None,
    }


def _bailingmoe2(reader: ConfigReader) -> Values:
    """Ling 2.0 and Ring 2.0."""
    keys = reader.keys
    keys.expect("expert_gating_func", _SIGMOID)
    keys.ignore("expert_shared_feed_forward_length")  # as large as the shared experts are together, or as one of them
    values = reader.usual("BailingMoeV2ForCausalLM", "bailing_moe")
    values.setdefault("partial_rotary_factor", 1.0)
    return {
        **values,
        **deepseek_experts(reader),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0),
        "num_experts": keys.integer("expert_count"),
        "num_shared_experts": keys.integer("expert_shared_count"),
        "use_qkv_bias": keys.has_tensor("attn_qkv.bias"),
        "num_nextn_predict_layers": reader.num_prediction_layers,
    }


def deepseek_experts(reader: ConfigReader) -> Values:
    keys = reader.keys
    return {
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "routed_scaling_factor": keys.get("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
        "n_group": keys.get("expert_group_count", 1) or 1,
        "topk_group": keys.get("expert_group_used_count", 1) or 1,
    }


def _ernie4_5_moe(reader: ConfigReader) -> Values:
    """ERNIE 4.5 21B-A3B and 300B-A47B."""
    keys = reader.keys
    keys.expect("expert_gating_func", _SOFTMAX)
    keys.expect("expert_weights_scale", 1.0)
    keys.ignore("expert_shared_feed_forward_length")  # the converter's guess, of other sizes
    return {
        **reader.usual("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", theta=500_000.0),
        "moe_num_experts": keys.integer("expert_count"),
        "moe_k": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.integer("expert_shared_count", 0),
        "moe_layer_start_index": keys.integer("leading_dense_block_count", 0),
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1),
    }


def _hunyuan_moe(reader: ConfigReader) -> Values:
    """Hunyuan A13B, whose file has the rope's base with alpha."""
    keys = reader.keys
    values = reader.usual("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe")
    size = values["intermediate_size"]
    keys.expect("expert_feed_forward_length", size)
    keys.expect("expert_shared_feed_forward_length", size)
    keys.expect("expert_shared_count", 1)
    keys.expect("expert_weights_scale", 1.0)
    return {
        **values,
        **reader.attention_bias(),
        "num_experts": keys.integer("expert_count"),
        "moe_topk": keys.integer("expert_used_count"),
    }


def _granitemoe(reader: ConfigReader) -> Values:
    """Granite 3 MoE, with or without a block that every token goes through."""
    keys = reader.keys
    keys.expect("rope.scaling.finetuned", True)
    shared_size = keys.integer("expert_shared_feed_forward_length", 0)
    if shared_size:
        values = reader.usual("GraniteMoeSharedForCausalLM", "granitemoeshared")
        values["shared_intermediate_size"] = shared_size
    else:
        values = reader.usual("GraniteMoeForCausalLM", "granitemoe")
    return {**values, **reader.granite_multipliers(), **reader.attention_bias(), **granite_experts(reader)}


def granite_experts(reader: ConfigReader) -> Values:
    keys = reader.keys
    keys.expect("expert_weights_scale", 1.0)
    return {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


# Phi-3.5-MoE's, which the keys have otherwise or not at all: llama.cpp computes the attention factor as Phi-3's, and
# chooses experts by their scores alone.
_PHIMOE_MSCALE, _PHIMOE_JITTER = 1.243163121016122, 0.01


def _phimoe(reader: ConfigReader) -> Values:
    keys = reader.keys
    keys.expect("attention.sliding_window", 0, keys.get("context_length"))
    long, short = reader.read_tensor(ROPE_FACTORS_LONG), reader.read_tensor(ROPE_FACTORS_SHORT)
    values = reader.usual("PhimoeForCausalLM", "phimoe")
    original = keys.get("rope.scaling.original_context_length", values["max_position_embeddings"])
    if long is not None and short is not None:
        factors = {"long_factor": long.tolist(), "short_factor": short.tolist()}
        mscale = keys.assume("short_mscale", _PHIMOE_MSCALE)
        values["rope_scaling"] = {
            **{"rope_type": "longrope", "short_mscale": mscale, "long_mscale": mscale},
            **{"original_max_position_embeddings": original, **factors},
        }
    return {
        **values,
        **reader.attention_bias(),
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "router_jitter_noise": keys.assume("router_jitter_noise", _PHIMOE_JITTER),
        "lm_head_bias": keys.has_tensor("output.bias"),
        "sliding_window": None,
    }


WITH_EXPERTS: Mapping[str, Callable[[ConfigReader], Values]] = {
    "olmoe": _olmoe,
    "qwen2moe": _qwen2moe,
    "dots1": _dots1,
    "bailingmoe2": _bailingmoe2,
    "ernie4_5-moe": _ernie4_5_moe,
    "hunyuan-moe": _hunyuan_moe,
    "granitemoe": _granitemoe,
    "phimoe": _phimoe,
}
"""Readers by `general.architecture`."""
