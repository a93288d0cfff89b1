"""OLMoE (arXiv:2409.02060): the Llama layer with OLMo 2's norms of queries and keys, and many small experts."""

from __future__ import annotations

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.moe import SparseMoE
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.olmo import olmo_attention


class OlmoeDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        routing = Routing.of(config, renormalize=config.get("norm_topk_prob", False))
        super().__init__(
            scope,
            self_attn=olmo_attention(scope / "self_attn"),
            mlp=SparseMoE(scope / "mlp", routing, intermediate_size=config["intermediate_size"]),
        )


class OlmoeForCausalLM(CausalLM):
    layer_class = OlmoeDecoderLayer
    router_aux_loss_coef = 0.01
    supported_values = (("clip_qkv", None),)


FAMILY = Family(
    "OLMoE",
    (OlmoeForCausalLM,),
    "64 experts, 8 per token; norms on all heads together",
    gguf=("olmoe",),
    defaults={"olmoe": {"rms_norm_eps": 1e-5}},
)
