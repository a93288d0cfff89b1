"""Mixtral: the Mistral layer with a mixture of experts in place of the feed-forward block."""

from __future__ import annotations

from jaxis.config.layer_types import uniform_span
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family


class MixtralDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        routing = Routing.of(config, renormalize=True)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn", span=uniform_span(config, config.get("sliding_window"))
            ),
            mlp=SparseMoE(scope / "mlp", routing, intermediate_size=config["intermediate_size"]),
        )


class MixtralForCausalLM(CausalLM):
    layer_class = MixtralDecoderLayer
    router_aux_loss_coef = 0.001
    renames = (("block_sparse_moe", "mlp"),)
    supported_values = (("norm_topk_prob", True),)


FAMILY = Family("Mixtral", (MixtralForCausalLM,), "8 experts, 2 per token", gguf=("llama",))
