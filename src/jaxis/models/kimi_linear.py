"""Kimi Linear (arXiv:2510.26692): Kimi Delta Attention, latent attention without positions in every fourth layer."""

from __future__ import annotations

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.kda_hybrid import hybrid_moe, hybrid_routing
from jaxis.models.common.kimi import KimiCausalLM, kimi_mixer
from jaxis.models.common.sparse_layers import is_sparse_layer


class KimiLinearDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        mlp: FeedForward
        if is_sparse_layer(scope.config, scope.layer_index, default_first_sparse=1):
            mlp = hybrid_moe(scope / "mlp", routing=hybrid_routing(scope.config))
        else:
            mlp = GatedMLP(scope / "mlp")
        super().__init__(scope, self_attn=kimi_mixer(scope / "self_attn"), mlp=mlp)


class KimiLinearForCausalLM(KimiCausalLM):
    layer_class = KimiLinearDecoderLayer


FAMILY = Family(
    "Kimi Linear",
    (KimiLinearForCausalLM,),
    "Kimi Delta Attention, whose state of a fixed size decays channel by channel, in three of four layers; "
    "latent attention without RoPE in the others; 256 experts by sigmoid with a selection bias",
)
