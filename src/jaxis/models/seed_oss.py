"""Seed-OSS: the Llama layer with biases on queries, keys and values, and heads of their own size."""

from __future__ import annotations

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family, PlainGGUF


class SeedOssDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=128,
                qkv_bias=config.get("attention_bias", True),
                o_bias=config.get("attention_out_bias", False),
            ),
            mlp=GatedMLP(scope / "mlp", use_bias=config.get("mlp_bias", False)),
        )


class SeedOssForCausalLM(CausalLM):
    layer_class = SeedOssDecoderLayer


FAMILY = Family(
    "Seed-OSS",
    (SeedOssForCausalLM,),
    "biases on queries, keys and values",
    gguf=(
        PlainGGUF(
            "seed_oss",
            switches={
                "attention_bias": ["attn_q.bias", "attn_qkv.bias"],
                "attention_out_bias": ["attn_output.bias"],
                "mlp_bias": ["ffn_up.bias"],
            },
            tensors={"post_attention_norm": "post_attention_layernorm"},
        ),
    ),
)
