"""DeepSeek V3 and R1, and Kimi K2: as DeepSeek V2, with experts chosen by sigmoid scores and a selection bias."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.scope import LayerScope
from jaxis.models.common.deepseek import DeepseekCausalLM, DeepseekDecoderLayer, deepseek_v3_routing


class DeepseekV3DecoderLayer(DeepseekDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        super().__init__(
            scope,
            routing=deepseek_v3_routing(config),
            is_sparse=scope.layer_index >= config["first_k_dense_replace"],
            use_selection_bias=True,
            interleaved_rope=config.get("rope_interleave", True),
        )


class DeepseekV3ForCausalLM(DeepseekCausalLM):
    layer_class = DeepseekV3DecoderLayer

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect("moe_layer_freq", 1)
