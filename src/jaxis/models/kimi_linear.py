"""Kimi Linear (arXiv:2510.26692): Kimi Delta Attention, latent attention without positions in every fourth layer."""

from __future__ import annotations

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.kimi import KimiCausalLM, kimi_feed_forward, kimi_mixer


class KimiLinearDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, self_attn=kimi_mixer(scope / "self_attn"), mlp=kimi_feed_forward(scope))


class KimiLinearForCausalLM(KimiCausalLM):
    layer_class = KimiLinearDecoderLayer


FAMILY = Family(
    "Kimi Linear",
    (KimiLinearForCausalLM,),
    "Kimi Delta Attention, whose state of a fixed size decays channel by channel, in three of four layers; "
    "latent attention without RoPE in the others; 256 experts by sigmoid with a selection bias",
    gguf=("kimi-linear",),
)
