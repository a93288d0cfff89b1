"""FlexOLMo (arXiv:2507.07024): OLMo 2's layer with a mixture of experts."""

from __future__ import annotations

from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PostNormDecoderLayer
from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.olmo import olmo_attention


class FlexOlmoDecoderLayer(PostNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        routing = Routing.of(config, renormalize=config.get("norm_topk_prob", False))
        rope = rope_config(config, default_theta=500_000.0)
        super().__init__(
            scope,
            self_attn=olmo_attention(scope / "self_attn", rope_settings=rope),
            mlp=SparseMoE(scope / "mlp", routing, intermediate_size=config["intermediate_size"]),
        )


class FlexOlmoForCausalLM(CausalLM):
    layer_class = FlexOlmoDecoderLayer
    router_aux_loss_coef = 0.01
    supported_values = (("clip_qkv", None),)


FAMILY = Family("FlexOLMo", (FlexOlmoForCausalLM,), "as OLMo 2, with experts")
