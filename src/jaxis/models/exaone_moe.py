"""K-EXAONE: head norms, DeepSeek V3's experts; three of four layers have a window and a rope, the fourth neither."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import SLIDING_ATTENTION, layer_span, layer_type
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.sparse_layers import (
    dense_or_sparse,
    is_sparse_layer,
    sigmoid_routing,
)


class ExaoneMoeDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        kind = layer_type(config, scope.layer_index, full_every=4)
        has_no_windows = config.get("sliding_window", 4096) is None
        routing = sigmoid_routing(config, 2.5)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                qk_norm=True,
                use_rope=has_no_windows or kind == SLIDING_ATTENTION,
                span=layer_span(config, kind, default_window=4096),
            ),
            mlp=dense_or_sparse(
                scope,
                routing,
                is_sparse=is_sparse_layer(scope.config, scope.layer_index, default_first_sparse=1),
                num_shared_experts=config.get("num_shared_experts", 1),
            ),
        )


class ExaoneMoeForCausalLM(CausalLM):
    layer_class = ExaoneMoeDecoderLayer
    prediction_modules = ("mtp.",)
    renames = (("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),)

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        for key in ("is_moe_layer", "first_last_k_dense_replace"):
            config.ignore(key, because="mlp_layer_types or the number of dense layers says it, as in the reference")


FAMILY = Family(
    "K-EXAONE",
    (ExaoneMoeForCausalLM,),
    "norms on heads, a window and RoPE in three of four layers and neither in the fourth, DeepSeek V3's routing",
    same_code={"ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM"},
    other_names={"ExaoneMoEForCausalLM": ExaoneMoeForCausalLM},
    gguf=("exaone-moe",),
)
