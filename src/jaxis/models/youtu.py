"""Youtu-LLM: latent attention as DeepSeek V3's, and dense blocks."""

from __future__ import annotations

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.deepseek import latent_attention
from jaxis.models.common.family import Family


class YoutuDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        interleaved = scope.config.get("rope_interleave", True)
        super().__init__(
            scope,
            self_attn=latent_attention(scope / "self_attn", interleaved_rope=interleaved),
            mlp=GatedMLP(scope / "mlp", use_bias=scope.config.get("mlp_bias", False)),
        )


class YoutuForCausalLM(CausalLM):
    layer_class = YoutuDecoderLayer
    tied_by_default = True


FAMILY = Family("Youtu-LLM", (YoutuForCausalLM,), "latent attention, dense blocks")
