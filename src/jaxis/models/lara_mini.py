"""Lara 4 Mini: gated delta networks, windows with a rope and full layers without, experts and a shared one."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp

from jaxis.config.layer_types import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    SLIDING_ATTENTION,
    layer_span,
    listed_layer_type,
)
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.experts import StackLayout
from jaxis.layers.gated_delta_net import GatedDeltaNet, Projections
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import linear
from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.qwen_hybrid import TINY_DELTA_NET

_PERIOD = (LINEAR_ATTENTION, SLIDING_ATTENTION, LINEAR_ATTENTION, FULL_ATTENTION, SLIDING_ATTENTION)


class LaraMiniDeltaNet(GatedDeltaNet):
    """Linear attention whose projections are one."""

    def make_projections(self, scope: LayerScope) -> None:
        num_heads = self.num_value_heads
        self._sizes = (2 * self.keys_size + self.values_size, self.values_size, num_heads, num_heads)
        self.in_proj = linear(scope / "in_proj", scope.config["hidden_size"], sum(self._sizes), axes=("heads", "embed"))

    def project(self, x: jax.Array) -> Projections:
        return Projections(*jnp.split(self.in_proj(x), [*itertools.accumulate(self._sizes[:-1])], axis=-1))


class LaraMiniDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config, index = scope.config, scope.layer_index
        kind = listed_layer_type(config, index, *dict.fromkeys(_PERIOD)) or _PERIOD[index % len(_PERIOD)]
        if kind == LINEAR_ATTENTION:
            name, mixer = "linear_attn", LaraMiniDeltaNet(scope / "linear_attn")
        else:
            use_bias = config.get("attention_bias", False)
            name = "self_attn"
            mixer = GroupedQueryAttention(
                scope / name,
                head_dim=128,
                use_rope=kind == SLIDING_ATTENTION,
                qk_norm=True,
                use_bias=use_bias,
                span=layer_span(config, kind, default_window=512),
            )
        super().__init__(scope, self_attn=mixer, mlp=_experts(scope), mixer_name=name)


def _experts(scope: LayerScope) -> SparseMoE:
    config = scope.config
    return SparseMoE(
        scope / "mlp",
        Routing.of(config, renormalize=config.get("norm_topk_prob", True), float32_logits=True),
        stack_layout=StackLayout(transposed=False),
        shared_size=config["shared_expert_intermediate_size"],
    )


class LaraMiniForCausalLM(CausalLM):
    layer_class = LaraMiniDecoderLayer
    tied_by_default = True
    router_aux_loss_coef = 0.001
    renames = (("mlp.shared_expert", "mlp.shared_experts"), ("linear_attn.out_norm", "linear_attn.norm"))


FAMILY = Family(
    "Lara 4 Mini",
    (LaraMiniForCausalLM,),
    "gated delta networks in two of five layers, a window and RoPE in two, neither in one; 128 experts, a shared one",
    tiny=TINY_DELTA_NET,
)
