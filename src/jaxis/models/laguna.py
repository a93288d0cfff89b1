"""Laguna: Qwen3's layer with a softplus gate on attention's output, windows with more heads, sigmoid-routed experts."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, layer_span, listed_layer_type
from jaxis.config.rope_config import rope_config
from jaxis.kernels.materialize import in_whole_vectors
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import FeedForward
from jaxis.layers.output_gate import OutputGate
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.sparse_layers import dense_or_sparse, is_sparse_layer


class LagunaDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config, index = scope.config, scope.layer_index
        kind = listed_layer_type(config, index, FULL_ATTENTION, SLIDING_ATTENTION) or FULL_ATTENTION
        num_heads = config.get("num_attention_heads_per_layer", [config["num_attention_heads"]] * (index + 1))[index]
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                num_heads=num_heads,
                head_dim=128,
                rope_settings=rope_config(
                    config,
                    kind,
                    default_theta=500_000.0,
                    default_local_theta=10_000.0,
                    default_partial_rotary_factor=0.5 if kind == FULL_ATTENTION else 1.0,
                ),
                use_bias=config.get("attention_bias", False),
                qk_norm=True,
                span=layer_span(config, kind, default_window=512),
                output_gate=OutputGate(
                    "g_proj",
                    per_head=config.get("gating", True) in (True, "per-head"),
                    activation="softplus",
                ),
            ),
            mlp=_feed_forward(scope),
        )


class LagunaForCausalLM(CausalLM):
    layer_class = LagunaDecoderLayer
    router_aux_loss_coef = 0.001
    renames = (
        ("mlp.experts.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        ("mlp.shared_expert", "mlp.shared_experts"),
    )
    module_renames = ()  # transformers has the names that are used here
    # PEFT applies transformers' renames of checkpoints to adapters. One of them, read as a regular expression, corrupts
    # these names.
    unadaptable = tuple(f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj"))

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect("gating", True, "per-head", "per-element")
        config.expect_all(moe_apply_router_weight_on_input=False, norm_topk_prob=True, moe_router_use_sigmoid=True)
        config.expect_all(qkv_bias=config.get("attention_bias", False), decoder_sparse_step=1)
        if "mlp_layer_types" in config:
            config.ignore("mlp_only_layers", because="mlp_layer_types names each layer's kind")
        else:
            config.expect("mlp_only_layers", [0])
        config.ignore("num_attention_heads", because="num_attention_heads_per_layer has each layer's")


@dataclass(frozen=True, kw_only=True)
class LagunaRouting(Routing):
    """Routing by logits that first become `soft_cap * tanh(logits / soft_cap)`; 0 leaves them as they are."""

    soft_cap: float

    def bounded(self, logits: jax.Array) -> jax.Array:
        return self.soft_cap * in_whole_vectors(jnp.tanh, logits / self.soft_cap) if self.soft_cap else logits


def _feed_forward(scope: LayerScope) -> FeedForward:
    config = scope.config
    routing = LagunaRouting.of(
        config,
        score_function="sigmoid",
        soft_cap=config.get("moe_router_logit_softcapping", 0.0),
        renormalize=True,
        scaling_factor=config.get("moe_routed_scaling_factor", 1.0),
    )
    return dense_or_sparse(
        scope,
        routing,
        is_sparse=is_sparse_layer(config, scope.layer_index, default_first_sparse=1),
        shared_size=config["shared_expert_intermediate_size"],
    )


FAMILY = Family(
    "Laguna", (LagunaForCausalLM,), "attention with a softplus gate per head, windows with more heads; sigmoid experts"
)
