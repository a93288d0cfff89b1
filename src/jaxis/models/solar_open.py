"""Solar Open: GLM-4.5's experts in every layer, attention without biases."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.sparse_layers import (
    dense_or_sparse,
    expect_no_dense_layers,
    sigmoid_routing,
)


class SolarOpenDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        routing = sigmoid_routing(config)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=128,
                rope_settings=rope_config(config, default_theta=1_000_000.0),
                qkv_bias=config.get("attention_bias", False),
            ),
            mlp=dense_or_sparse(scope, routing, is_sparse=True, num_shared_experts=config.get("n_shared_experts", 1)),
        )


class SolarOpenForCausalLM(CausalLM):
    layer_class = SolarOpenDecoderLayer

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        expect_no_dense_layers(config)
        config.expect("use_qk_norm", False)


FAMILY = Family("Solar Open 100B", (SolarOpenForCausalLM,), "DeepSeek V3's routing in every layer, YaRN")
