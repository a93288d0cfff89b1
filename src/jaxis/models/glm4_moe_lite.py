"""GLM-4.7 Flash: DeepSeek V3, with the sparse layers listed."""

from __future__ import annotations

from jaxis.layers.scope import LayerScope
from jaxis.models.common.deepseek import DeepseekCausalLM, DeepseekDecoderLayer, deepseek_v3_routing
from jaxis.models.common.family import Family
from jaxis.models.common.sparse_layers import is_sparse_layer


class Glm4MoeLiteDecoderLayer(DeepseekDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(
            scope,
            routing=deepseek_v3_routing(scope.config),
            is_sparse=is_sparse_layer(scope.config, scope.layer_index, default_first_sparse=1),
            use_selection_bias=True,
            interleaved_rope=scope.config.get("rope_interleave", True),
        )


class Glm4MoeLiteForCausalLM(DeepseekCausalLM):
    layer_class = Glm4MoeLiteDecoderLayer


FAMILY = Family("GLM-4.7 Flash", (Glm4MoeLiteForCausalLM,), "latent attention, DeepSeek V3's routing")
