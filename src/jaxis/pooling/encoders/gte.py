"""GTE (arXiv:2407.19669): BERT with rotary positions and a gated feed-forward block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from jaxis.config.attention_span import WHOLE_SEQUENCE
from jaxis.config.rope_config import rope_config
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.qkv_packing import PACKED
from jaxis.layers.scope import LayerScope
from jaxis.pooling.encoders.first_token_head import with_first_token_head
from jaxis.pooling.encoders.nomic_bert import RotaryBertLayer
from jaxis.pooling.encoders.text_encoder import BertEncoder, PostNormLayer

_PACKED = "mlp.up_gate_proj.weight"


class GteLayer(RotaryBertLayer):
    """`RotaryBertLayer` with biases."""

    default_theta: ClassVar[float] = 160_000.0

    def __init__(self, scope: LayerScope) -> None:
        self.self_attn = GroupedQueryAttention(
            scope / "self_attn",
            rope_settings=rope_config(scope.config, default_theta=self.default_theta),
            packing=PACKED,
            use_bias=True,
            span=WHOLE_SEQUENCE,
        )
        activation = scope.config.get("hidden_act", "gelu")
        self.mlp = GatedMLP(scope / "mlp", activation=activation, down_bias=True)
        PostNormLayer.__init__(self, scope)


class GteModel(BertEncoder):
    """gte-multilingual and gte-v1.5 in transformers' format, and snowflake-arctic-embed-m-v2.0."""

    renames = (
        ("embeddings.word_embeddings", "embed_tokens"),
        ("embeddings.token_type_embeddings.weight", "token_type_embeddings"),
        ("embeddings.LayerNorm", "embeddings_norm"),
        ("encoder.layer", "layers"),
        ("attention.qkv_proj", "self_attn.qkv_proj"),
        ("attention.o_proj", "self_attn.o_proj"),
        ("attn_ln", "post_attention_layernorm"),
        ("mlp_ln", "post_feedforward_layernorm"),
    )
    unused = ("pooler.", "classifier.", "lm_head.", "embeddings.position_ids")
    prefixes = ("new.", "gte.")
    default_token_types = 1
    layer_class = GteLayer

    supported_values = (
        *(("position_embedding_type", "rope"), ("layer_norm_type", "layer_norm")),
        *(("pack_qkv", True), ("logn_attention_scale", False)),
    )
    ignored_keys = (
        ("logn_attention_clip1", "scores are not scaled by the length"),
        (("unpad_inputs", "use_memory_efficient_attention"), "it chooses how the same is computed"),
        *BertEncoder.ignored_keys,
    )

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        return super().load_weights(_unpacked(weights))


class GteForSequenceClassification(with_first_token_head(GteModel)):
    """Cross-encoders and classifiers on GTE."""

    renames = (*GteModel.renames, ("pooler", "score"), ("classifier", "score.out_proj"))
    unused = ("lm_head.", "embeddings.position_ids")


class NewLayer(GteLayer):
    """`GteLayer` with the default theta of its makers' configuration."""

    default_theta = 10_000.0


class NewModel(GteModel):
    """gte-multilingual and gte-v1.5 as their makers publish them."""

    layer_class = NewLayer


class NewForSequenceClassification(with_first_token_head(NewModel)):
    """gte-multilingual-reranker as its makers publish it."""

    renames, unused = GteForSequenceClassification.renames, GteForSequenceClassification.unused


def _unpacked(weights: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
    """Yields the weights with the two matrices that checkpoints have as one, ups before gates."""
    for name, tensor in weights:
        if name.endswith(_PACKED):
            prefix, half = name.removesuffix(_PACKED), len(tensor) // 2
            yield f"{prefix}mlp.up_proj.weight", tensor[:half]
            yield f"{prefix}mlp.gate_proj.weight", tensor[half:]
        else:
            yield name, tensor
