"""Gemma 2 (arXiv:2408.00118): norms before and after each block, soft caps, a window over every second layer."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import layer_span, layer_type
from jaxis.layers.decoder_layer import SandwichNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.gemma import GemmaCausalLM, gemma_mlp, gemma_norm


class Gemma2DecoderLayer(SandwichNormDecoderLayer):
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


class Gemma2ForCausalLM(GemmaCausalLM):
    layer_class = Gemma2DecoderLayer
    default_logits_soft_cap = 30.0

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        super().check_config(config)
        # The first checkpoints have the window under two names.
        config.expect("sliding_window_size", config.get("sliding_window"))


FAMILY = Family(
    "Gemma 2",
    (Gemma2ForCausalLM,),
    "norms before and after, soft caps, a window in every other layer",
    gguf=("gemma2",),
)
