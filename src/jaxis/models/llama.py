"""Llama 2 to 3.3 (text), InternLM3 and IQuest-Coder: grouped-query attention, gated MLP, RMS norm before each."""

from __future__ import annotations

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family


class LlamaDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        use_bias = scope.config.get("attention_bias", False)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", qkv_bias=use_bias, o_bias=use_bias),
            mlp=GatedMLP(scope / "mlp", use_bias=scope.config.get("mlp_bias", False)),
        )


class LlamaForCausalLM(CausalLM):
    layer_class = LlamaDecoderLayer


FAMILY = Family(
    "Llama 2, 3, 3.1, 3.2 (text), 3.3; InternLM3; IQuest-Coder",
    (LlamaForCausalLM,),
    "grouped-query attention, llama3 RoPE scaling",
    gguf=("llama",),
    other_names={"IQuestCoderForCausalLM": LlamaForCausalLM, "InternLM3ForCausalLM": LlamaForCausalLM},
)
