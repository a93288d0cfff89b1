"""Kolibri 1: norms before and after each block, windows with a rope in four of five layers, sigmoid-routed experts."""

from __future__ import annotations

import jax

from jaxis.config.layer_types import SLIDING_ATTENTION, layer_span, layer_type
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.glm import GlmSandwichDecoderLayer


class Kolibri1DecoderLayer(GlmSandwichDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        kind = layer_type(config, scope.layer_index, full_every=5)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=128,
                use_rope=kind == SLIDING_ATTENTION,
                qk_norm=True,
                span=layer_span(config, kind, default_window=513),
            ),
            mlp=SparseMoE(
                scope / "mlp",
                KolibriRouting.of(
                    config,
                    score_function="sigmoid",
                    renormalize=config.get("norm_topk_prob", False),
                    float32_logits=True,
                ),
                use_selection_bias=True,
                shared_size=config["shared_expert_intermediate_size"],
            ),
        )


class KolibriRouting(Routing):
    def biased(self, logits: jax.Array, scores: jax.Array, selection_bias: jax.Array) -> jax.Array:
        del scores
        return logits + selection_bias


class Kolibri1ForCausalLM(CausalLM):
    layer_class = Kolibri1DecoderLayer
    renames = (
        ("moe.router.expert_bias", "mlp.gate.e_score_correction_bias"),
        ("post_attn_norm", "post_self_attn_layernorm"),
        ("post_ffn_norm", "post_mlp_layernorm"),
    )
    module_renames = ()
    supported_values = (("hidden_act", "silu"),)


FAMILY = Family(
    "Kolibri 1",
    (Kolibri1ForCausalLM,),
    "norms before and after, and on heads; a window and RoPE in four of five layers and neither in the fifth; "
    "384 experts by sigmoid with a bias on the logits",
)
