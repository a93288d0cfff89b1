"""Encoders that are BERT with rotary positions and a gated feed-forward block, norms after each block."""

from __future__ import annotations

from jaxis.config.attention_span import WHOLE_SEQUENCE
from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.qkv_packing import PACKED
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import GPT2_NAMES
from jaxis.pooling.encoders.first_token_head import with_first_token_head
from jaxis.pooling.encoders.text_encoder import BertEncoder, PostNormLayer

CONFIG_NAMES = {"nomic_bert": {**GPT2_NAMES, "rotary_emb_base": "rope_theta"}}
"""Own names of keys, as in `Family.names`."""


class RotaryBertLayer(PostNormLayer):
    """`PostNormLayer` with rotary positions and a gated feed-forward block."""

    def __init__(self, scope: LayerScope) -> None:
        rope = rope_config(scope.config, default_theta=1000.0)
        self.self_attn = GroupedQueryAttention(
            scope / "self_attn", rope_settings=rope, packing=PACKED, span=WHOLE_SEQUENCE
        )
        self.mlp = GatedMLP(scope / "mlp", activation="silu")
        super().__init__(scope)


class NomicBertModel(BertEncoder):
    """nomic-embed-text v1 and v1.5 (arXiv:2402.01613)."""

    layer_class = RotaryBertLayer
    renames = (
        ("embeddings.word_embeddings", "embed_tokens"),
        ("embeddings.token_type_embeddings.weight", "token_type_embeddings"),
        ("emb_ln", "embeddings_norm"),
        ("encoder.layers", "layers"),
        ("attn.Wqkv", "self_attn.qkv_proj"),
        ("attn.out_proj", "self_attn.o_proj"),
        ("mlp.fc11", "mlp.up_proj"),
        ("mlp.fc12", "mlp.gate_proj"),
        ("mlp.fc2", "mlp.down_proj"),
        ("norm1", "post_attention_layernorm"),
        ("norm2", "post_feedforward_layernorm"),
    )
    prefixes = ("nomic_bert.", "bert.")
    unused = ("pooler.", "cls.", "embeddings.position_ids")

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        super().check_config(config)
        config.expect("hidden_act", "silu", "swiglu")
        config.expect_all(prenorm=False, parallel_block=False, causal=False, use_rms_norm=False)
        config.expect_all(rotary_emb_interleaved=False, qkv_proj_bias=False, mlp_fc1_bias=False, mlp_fc2_bias=False)
        config.expect_all(scale_attn_by_inverse_layer_idx=False, rotary_emb_fraction=1.0)
        for key in ("rotary_emb_scale_base", "rotary_scaling_factor", "num_experts", "moe_every_n_layers"):
            config.expect(key, None, 0)
        config.ignore("reorder_and_upcast_attn", because="scores are float32")
        config.ignore("dense_seq_output", "use_xentropy", because="a head that predicts words is not loaded")
        config.ignore("pad_vocab_size_multiple", because="vocab_size has the padding")
        config.ignore("max_trained_positions", because="positions are rotary")


class NomicBertForSequenceClassification(with_first_token_head(NomicBertModel)):
    """Cross-encoders and classifiers on Nomic's BERT: a head on the first token."""

    renames = (*NomicBertModel.renames, ("pooler", "score"), ("classifier", "score.out_proj"))
    unused = ("cls.", "embeddings.position_ids")
