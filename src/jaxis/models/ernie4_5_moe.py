"""ERNIE 4.5 MoE: rope of neighbouring dimensions, experts by softmax with a selection bias, shared experts."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import FeedForward
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.sparse_layers import dense_or_sparse


class Ernie45MoeDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                rope_settings=rope_config(scope.config, default_theta=500_000.0),
                interleaved_rope=True,
            ),
            mlp=_feed_forward(scope),
        )


class Ernie4_5_MoeForCausalLM(CausalLM):
    layer_class = Ernie45MoeDecoderLayer
    tied_by_default = True
    prediction_modules = ("model.mtp_",)
    router_aux_loss_coef = 0.001
    renames = (("mlp.moe_statics.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),)

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect_all(use_bias=False, moe_use_aux_free=True, use_rmsnorm=True, is_quantized=False)
        config.expect("moe_gate", "topk", "top2_fused")
        config.expect("moe_gate_act", "softmax")
        config.ignore("moe_capacity", because="no token is dropped")


@dataclass(frozen=True, kw_only=True)
class ErnieRouting(Routing):
    """Routing with a lower bound of the sum that divides a token's weights."""

    minimum: float

    def divisor(self, weights: jax.Array) -> jax.Array:
        return jnp.maximum(super().divisor(weights), self.minimum)


def _feed_forward(scope: LayerScope) -> FeedForward:
    config = scope.config
    routing = ErnieRouting(
        num_experts=config["moe_num_experts"],
        num_experts_per_token=config["moe_k"],
        renormalize=True,
        minimum=config.get("moe_norm_min", 1e-12),
        float32_logits=True,
    )
    first, last = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    is_between = first <= scope.layer_index <= (config["num_hidden_layers"] - 1 if last == -1 else last)
    is_dense = not is_between or (scope.layer_index + 1) % config.get("moe_layer_interval", 1)
    num_shared: int = config.get("moe_num_shared_experts", 2)
    return dense_or_sparse(scope, routing, is_sparse=not is_dense, num_shared_experts=num_shared)


FAMILY = Family(
    "ERNIE 4.5 MoE",
    (Ernie4_5_MoeForCausalLM,),
    "interleaved RoPE, experts by softmax with a selection bias, shared experts",
    gguf=("ernie4_5-moe",),
)
