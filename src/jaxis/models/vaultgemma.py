"""VaultGemma (arXiv:2510.15001): Gemma 2 without the norms after each block."""

from __future__ import annotations

from jaxis.config.layer_types import layer_span, layer_type
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.gemma import GemmaCausalLM, gemma_mlp, gemma_norm


class VaultGemmaDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        kind = layer_type(config, scope.layer_index, full_every=2)
        use_bias = config.get("attention_bias", False)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=256,
                scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
                qkv_bias=use_bias,
                o_bias=use_bias,
                span=layer_span(config, kind, default_window=4096),
                soft_cap=config.get_nullable("attn_logit_softcapping", 50.0),
            ),
            mlp=gemma_mlp(scope / "mlp"),
            make_norm=gemma_norm,
        )


class VaultGemmaForCausalLM(GemmaCausalLM):
    layer_class = VaultGemmaDecoderLayer
    default_logits_soft_cap = 30.0
    renames = (("pre_feedforward_layernorm", "post_attention_layernorm"),)


FAMILY = Family("VaultGemma", (VaultGemmaForCausalLM,), "as Gemma 2, without the norms after each block")
