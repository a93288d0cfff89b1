"""Command R, Command A and North."""

from __future__ import annotations

from jaxis.loading.gguf.common_facts import (
    ATTENTION_BIAS,
    BASE,
    CLASSIC,
    DENSE_FIRST,
    ONE_BASE,
    SIGMOID,
    SOFTMAX,
    experts,
    windows,
)
from jaxis.loading.gguf.config_reader import ConfigReader, Values
from jaxis.loading.gguf.rope_keys import rope
from jaxis.loading.gguf.table import GGUF, Fact, Written, has, key, unused

_COHERE = (CLASSIC, rope(), key("logit_scale", "logit_scale", kind=float))


def _scores(reader: ConfigReader) -> Values:
    reader.keys.expect("expert_gating_func", SIGMOID, SOFTMAX)
    is_softmax = reader.keys.get("expert_gating_func") == SOFTMAX
    return {"expert_selection_fn": "softmax" if is_softmax else "sigmoid"}


GGUFS = (
    GGUF(
        ("command-r", "cohere", "CohereForCausalLM"),
        (_COHERE, has("use_qk_norm", "attn_q_norm.weight"), ATTENTION_BIAS),
        written=Written(),
    ),
    GGUF(
        ("cohere2", "cohere2", "Cohere2ForCausalLM"),
        (_COHERE, windows(4), ONE_BASE),
        written=Written(window=True),
    ),
    GGUF(
        ("cohere2moe", "cohere2_moe", "Cohere2MoeForCausalLM"),
        (
            [BASE, rope(), key("logit_scale", "logit_scale", kind=float), windows(4), ONE_BASE, experts("num_experts")],
            key("rms_norm_eps", "attention.layer_norm_rms_epsilon", None, float),
            key("layer_norm_eps", "attention.layer_norm_epsilon", None, float),
            key("prefix_dense_intermediate_size", "feed_forward_length"),
            key("intermediate_size", "expert_feed_forward_length"),
            [DENSE_FIRST, unused("expert_shared_feed_forward_length"), Fact(_scores)],
            key("num_shared_experts", "expert_shared_count", 0),
            key("norm_topk_prob", "expert_weights_norm", False, bool),
        ),
    ),
)
