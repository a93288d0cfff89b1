"""Trinity (AFMoE): gated attention, sandwich norms; window and rope in three of four layers, neither in the fourth."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import SLIDING_ATTENTION, layer_span, layer_type
from jaxis.layers.decoder_layer import SandwichNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import FeedForward
from jaxis.layers.output_gate import OutputGate
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.sparse_layers import dense_or_sparse


class AfmoeDecoderLayer(SandwichNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        kind = layer_type(config, scope.layer_index, full_every=config.get("global_attn_every_n_layers", 4))
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=128,
                use_rope=kind == SLIDING_ATTENTION,
                use_bias=config.get("attention_bias", False),
                qk_norm=True,
                span=layer_span(config, kind, default_window=1024),
                output_gate=OutputGate("gate_proj"),
            ),
            mlp=_feed_forward(scope),
        )


class AfmoeForCausalLM(CausalLM):
    layer_class = AfmoeDecoderLayer
    renames = (
        ("pre_mlp_layernorm", "pre_feedforward_layernorm"),
        ("post_mlp_layernorm", "post_feedforward_layernorm"),
        ("mlp.router.gate", "mlp.gate"),
        ("mlp.expert_bias", "mlp.gate.e_score_correction_bias"),
    )

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect_all(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1, num_expert_groups=1)
        config.expect("num_limited_groups", 1)
        config.ignore("load_balance_coeff", because="it is for training")
        config.ignore("use_grouped_mm", because="it is how the same result is computed")

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        is_scaled = scope.config.get("mup_enabled", False)
        return DecoderOptions(embedding_multiplier=scope.config["hidden_size"] ** 0.5 if is_scaled else 1.0)


def _feed_forward(scope: LayerScope) -> FeedForward:
    config = scope.config
    factor = config.get("route_scale", 1.0)
    return dense_or_sparse(
        scope,
        Routing.of(config, score_function="sigmoid", renormalize=True, scaling_factor=factor),
        is_sparse=scope.layer_index >= config.get("num_dense_layers", 1),
        num_shared_experts=config.get("num_shared_experts", 2),
    )


FAMILY = Family(
    "Trinity",
    (AfmoeForCausalLM,),
    "gated attention with a window and RoPE in three of four layers and neither in the fourth; norms before "
    "and after; sigmoid experts",
    gguf=("afmoe",),
)
