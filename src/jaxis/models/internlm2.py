"""InternLM 2 and 2.5 (arXiv:2403.17297): Llama under other names, with packed projections group by group."""

from __future__ import annotations

from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.qkv_packing import PACKED_BY_GROUP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family


class InternLM2DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        use_bias = scope.config.get("bias", False)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(scope / "self_attn", packing=PACKED_BY_GROUP, use_bias=use_bias),
            mlp=GatedMLP(scope / "mlp"),
        )


class InternLM2ForCausalLM(CausalLM):
    layer_class = InternLM2DecoderLayer
    renames = (
        ("model.tok_embeddings", "model.embed_tokens"),
        ("attention_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("attention.wqkv", "self_attn.qkv_proj"),
        ("attention.wo", "self_attn.o_proj"),
        ("feed_forward.w1", "mlp.gate_proj"),
        ("feed_forward.w3", "mlp.up_proj"),
        ("feed_forward.w2", "mlp.down_proj"),
        ("output", "lm_head"),
    )


FAMILY = Family(
    "InternLM 2, 2.5", (InternLM2ForCausalLM,), "Llama under other names, packed projections", gguf=("internlm2",)
)
