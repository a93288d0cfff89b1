"""Configs of later relatives of Llama, OLMo and Qwen2, from the keys of GGUF files.

Source: llama.cpp's `src/models/*.cpp` of these architectures, and its converters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxis.loading.gguf.config_reader import ConfigReader, Values


def _arcee(reader: ConfigReader) -> Values:
    """AFM-4.5B."""
    return {
        **_usual(reader, "ArceeForCausalLM", "arcee"),
        **reader.attention_bias(),
        "hidden_act": "relu2",
        "mlp_bias": reader.keys.has_tensor("ffn_up.bias"),
    }


def _ernie4_5(reader: ConfigReader) -> Values:
    """ERNIE 4.5 (dense)."""
    return {
        **_usual(reader, "Ernie4_5ForCausalLM", "ernie4_5", theta=500_000.0),
        "use_bias": reader.keys.has_tensor("attn_output.bias"),
    }


def _exaone4(reader: ConfigReader) -> Values:
    """EXAONE 4; without windows, every layer has a rope."""
    values = {**_usual(reader, "Exaone4ForCausalLM", "exaone4", theta=1_000_000.0), "sliding_window": reader.window()}
    return values if values["sliding_window"] is None else {**values, "layer_types": reader.layer_types(full_every=4)}


def _olmoe(reader: ConfigReader) -> Values:
    """OLMoE, of which llama.cpp knows that the weights of experts are not normalised."""
    return {
        **_usual(reader, "OlmoeForCausalLM", "olmoe"),
        "num_experts": reader.keys.integer("expert_count"),
        "num_experts_per_tok": reader.keys.integer("expert_used_count"),
        "norm_topk_prob": reader.keys.assume("norm_topk_prob", False),
    }


def _qwen2moe(reader: ConfigReader) -> Values:
    """Qwen1.5 and Qwen2 MoE, whose experts have all layers."""
    keys = reader.keys
    return {
        **_usual(reader, "Qwen2MoeForCausalLM", "qwen2_moe"),
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": keys.assume("norm_topk_prob", False),
    }


def _usual(reader: ConfigReader, architecture: str, model_type: str, *, theta: float = 10_000.0) -> Values:
    return {**reader.base(architecture, model_type), **reader.rms(), **reader.dense(), **reader.rope(theta=theta)}


LATER: Mapping[str, Callable[[ConfigReader], Values]] = {
    "arcee": _arcee,
    "ernie4_5": _ernie4_5,
    "exaone4": _exaone4,
    "olmoe": _olmoe,
    "qwen2moe": _qwen2moe,
}
"""By `general.architecture`."""
