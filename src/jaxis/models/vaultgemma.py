"""VaultGemma (arXiv:2510.15001): Gemma 2 without the norms after each block."""

from __future__ import annotations

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.gemma import GemmaCausalLM, gemma2_attention, gemma_mlp


class VaultGemmaDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, self_attn=gemma2_attention(scope / "self_attn"), mlp=gemma_mlp(scope / "mlp"))


class VaultGemmaForCausalLM(GemmaCausalLM):
    layer_class = VaultGemmaDecoderLayer
    default_logits_soft_cap = 30.0
    renames = (("pre_feedforward_layernorm", "post_attention_layernorm"),)


FAMILY = Family("VaultGemma", (VaultGemmaForCausalLM,), "as Gemma 2, without the norms after each block")
