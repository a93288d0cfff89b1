"""GLM-4.5, 4.6 and 4.7 (MoE): partial rope, dense layers first, then sigmoid-routed experts with a shared one."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.prediction_layers import PredictionNames
from jaxis.models.common.sparse_layers import (
    dense_or_sparse,
    num_dense_layers,
    sigmoid_routing,
)
from jaxis.models.common.text_part import InnerTextPart
from jaxis.models.common.towers.glm import GlmVision


class Glm4MoeDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        use_bias, qk_norm = config.get("attention_bias", False), config.get("use_qk_norm", False)
        routing = sigmoid_routing(config)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", qkv_bias=use_bias, qk_norm=qk_norm),
            mlp=dense_or_sparse(
                scope,
                routing,
                is_sparse=scope.layer_index >= num_dense_layers(config, 1),
                num_shared_experts=config.get("n_shared_experts", 1),
            ),
        )


class Glm4MoeForCausalLM(CausalLM):
    layer_class = Glm4MoeDecoderLayer
    default_prediction_layers = 1

    @classmethod
    def prediction_names(cls, config: HFConfig) -> PredictionNames | None:
        return PredictionNames.numbered(config)


class Glm4vMoeForConditionalGeneration(InnerTextPart, Glm4MoeForCausalLM):
    """GLM-4.5V and GLM-4.6V: the text model, with its image encoder."""

    tower = GlmVision
    router_aux_loss_coef = 0.0001
    text_model_types = ("glm4v_moe_text",)


FAMILY = Family(
    "GLM-4.5, 4.6; GLM-4.5V, 4.6V",
    (Glm4MoeForCausalLM, Glm4vMoeForConditionalGeneration),
    "partial RoPE, DeepSeek V3's routing; GLM-4.1V's tower, M-RoPE",
    gguf=("glm4moe",),
)
