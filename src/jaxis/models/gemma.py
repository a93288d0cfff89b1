"""Gemma 1 (arXiv:2403.08295): the Llama layer with Gemma's norms, a GELU gate and scaled embeddings."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.gemma import GemmaCausalLM


class GemmaDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        use_bias = scope.config.get("attention_bias", False)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", head_dim=256, use_bias=use_bias),
            mlp=GatedMLP(scope / "mlp", activation="gelu_pytorch_tanh"),
        )


class GemmaForCausalLM(GemmaCausalLM):
    layer_class = GemmaDecoderLayer

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        super().check_config(config)
        # The first checkpoints say "gelu", and mean the approximation that they were trained with.
        for key in ("hidden_act", "hidden_activation"):
            config.expect(key, "gelu_pytorch_tanh", "gelu")


FAMILY = Family(
    "Gemma, CodeGemma",
    (GemmaForCausalLM,),
    "scaled embeddings, a GELU gate, norms of 1 + weight",
    gguf=("gemma",),
)
