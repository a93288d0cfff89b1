"""LFM2 MoE: LFM2's layers, most of them with a mixture of experts."""

from __future__ import annotations

import jax

from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.lfm import LfmCausalLM, LfmDecoderLayer, lfm_mlp


class Lfm2MoeDecoderLayer(LfmDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        is_dense = scope.layer_index < scope.config.get("num_dense_layers", 2)
        super().__init__(scope, lfm_mlp(scope / "mlp") if is_dense else _moe(scope / "mlp"))


class Lfm2MoeForCausalLM(LfmCausalLM):
    layer_class = Lfm2MoeDecoderLayer


class Lfm2Routing(Routing):
    def divisor(self, weights: jax.Array) -> jax.Array:
        return weights.sum(-1, keepdims=True) + 1e-6


def _moe(scope: LayerScope) -> SparseMoE:
    config = scope.config
    routing = Lfm2Routing.of(
        config,
        score_function="sigmoid",
        renormalize=config.get("norm_topk_prob", True),
        scaling_factor=config.get("routed_scaling_factor", 1.0),
    )
    return SparseMoE(scope, routing, use_selection_bias=config.get("use_expert_bias", True))


FAMILY = Family(
    "LFM2 MoE", (Lfm2MoeForCausalLM,), "as LFM2, with sigmoid routing and a selection bias", gguf=("lfm2moe",)
)
