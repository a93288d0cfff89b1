"""GLM 4 9B, GLM-4-0414 and GLM-4.5."""

from __future__ import annotations

from jaxis.errors import ConfigError
from jaxis.loading.gguf.common_facts import (
    ATTENTION_BIAS,
    DENSE_FIRST,
    PREDICTION_LAYERS,
    ROUTED_EXPERTS,
    SIGMOID,
    experts,
    usual,
)
from jaxis.loading.gguf.config_reader import ConfigReader, Values
from jaxis.loading.gguf.table import GGUF, Fact, Written, has, key, only
from jaxis.loading.gguf.tensor_names import GATE_UP, NORM_AFTER_ATTENTION, GGUFNames


def _without_images(reader: ConfigReader) -> Values:
    if "rope.dimension_sections" in reader.keys or reader.num_prediction_layers:
        raise ConfigError(f"{reader.keys.source} is the text part of a GLM-4 vision model, which is not supported")
    return {}


GGUFS = (
    GGUF(
        ("chatglm", "glm", "GlmForCausalLM"),
        (usual(is_partial=True), has("attention_bias", "attn_q.bias", "attn_qkv.bias")),
        GGUFNames(GATE_UP),
    ),
    GGUF(
        ("glm4", "glm4", "Glm4ForCausalLM"),
        (Fact(_without_images), usual(is_partial=True), ATTENTION_BIAS),
        GGUFNames(
            {**GATE_UP, "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
        ),
        written=Written(biases=True),
    ),
    GGUF(
        ("glm4moe", "glm4_moe", "Glm4MoeForCausalLM"),
        (
            [usual(is_partial=True), ATTENTION_BIAS, has("use_qk_norm", "attn_q_norm.weight")],
            [ROUTED_EXPERTS, experts("n_routed_experts"), DENSE_FIRST, PREDICTION_LAYERS],
            key("norm_topk_prob", "expert_weights_norm", True, bool, is_assumed=True),
            key("n_shared_experts", "expert_shared_count"),
            only("expert_gating_func", SIGMOID, is_written=True),
        ),
        GGUFNames(NORM_AFTER_ATTENTION),
        written=Written(biases=True),
    ),
)
