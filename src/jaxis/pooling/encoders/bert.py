"""BERT (arXiv:1810.04805) and RoBERTa (arXiv:1907.11692): learned positions, norms after each block."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.config.attention_span import WHOLE_SEQUENCE
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.checkpoint_names import Rename
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.scope import LayerScope
from jaxis.pooling.encoders.first_token_head import with_first_token_head
from jaxis.pooling.encoders.text_encoder import BertEncoder, PostNormLayer, embedding_table


class BertLayer(PostNormLayer):
    """`PostNormLayer` without rotary positions, and with biases."""

    def __init__(self, scope: LayerScope) -> None:
        self.self_attn = GroupedQueryAttention(scope / "self_attn", use_rope=False, use_bias=True, span=WHOLE_SEQUENCE)
        activation = activation_function(scope.config.get("hidden_act", "gelu"))
        self.mlp = UngatedMLP(scope / "mlp", activation=activation, use_bias=True)
        super().__init__(scope)


def _other_names(prefix: str) -> tuple[Rename, ...]:
    """Returns names in checkpoints of whole models, which have a prefix, and another framework's in very old ones."""
    prefixed = tuple((f"{prefix}.{name}", name) for name in ("embeddings", "encoder", "pooler"))
    return (*prefixed, ("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))


class BertModel(BertEncoder):
    """Embeddings of words, positions and token types, then layers."""

    layer_class = BertLayer
    renames = (
        ("embeddings.word_embeddings", "embed_tokens"),
        ("embeddings.position_embeddings.weight", "position_embeddings"),
        ("embeddings.token_type_embeddings.weight", "token_type_embeddings"),
        ("embeddings.LayerNorm", "embeddings_norm"),
        ("encoder.layer", "layers"),
        ("attention.self.query", "self_attn.q_proj"),
        ("attention.self.key", "self_attn.k_proj"),
        ("attention.self.value", "self_attn.v_proj"),
        ("attention.output.dense", "self_attn.o_proj"),
        ("attention.output.LayerNorm", "post_attention_layernorm"),
        ("intermediate.dense", "mlp.up_proj"),
        ("output.dense", "mlp.down_proj"),
        ("output.LayerNorm", "post_feedforward_layernorm"),
    )
    other_names = _other_names("bert")
    unused = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids")
    supported_values = (("position_embedding_type", "absolute"), ("is_decoder", False), ("add_cross_attention", False))

    def add_parts(self, scope: LayerScope) -> None:
        super().add_parts(scope)
        self.position_embeddings = embedding_table(scope, scope.config.get("max_position_embeddings", 512))

    def with_positions(self, embeddings: jax.Array, input_ids: jax.Array, metadata: AttentionMetadata) -> jax.Array:
        return embeddings + self.position_embeddings[...][self.position_rows(input_ids, metadata)]

    def position_rows(self, input_ids: jax.Array, metadata: AttentionMetadata) -> jax.Array:
        """i32 [T]: row of each token in the table of positions."""
        del input_ids
        return metadata.input_positions


class RobertaModel(BertModel):
    """BERT with positions that start after the padding token's id and count only tokens that are not padding."""

    other_names = _other_names("roberta")

    def add_parts(self, scope: LayerScope) -> None:
        super().add_parts(scope)
        self._padding_id = self.first_position(scope.config) - 1

    def position_rows(self, input_ids: jax.Array, metadata: AttentionMetadata) -> jax.Array:
        """i32 [T]: row of each token. Padding within a prompt gets the padding row and is not counted."""
        counts = input_ids != self._padding_id
        before = jnp.cumsum(counts) - counts
        starts = jnp.arange(len(input_ids)) - metadata.input_positions
        return self._padding_id + jnp.where(counts, 1 + before - before[starts], 0)

    @classmethod
    def first_position(cls, config: HFConfig) -> int:
        """Returns the position embedding's row of an input's first token."""
        padding = config.get("pad_token_id", 1)
        if not isinstance(padding, int) or padding < 0:
            raise ConfigError(
                f"{config.source} has pad_token_id={padding!r}, behind which positions begin: correct the file"
            )
        return padding + 1


class XLMRobertaModel(RobertaModel):
    """RoBERTa with the vocabulary of a hundred languages (arXiv:1911.02116)."""


class BertForSequenceClassification(with_first_token_head(BertModel)):
    """Cross-encoders and classifiers on BERT."""

    renames = (*BertModel.renames, ("pooler", "score"), ("classifier", "score.out_proj"))
    unused = ("cls.", "embeddings.position_ids")


class RobertaForSequenceClassification(with_first_token_head(RobertaModel)):
    """Cross-encoders, such as bge-reranker, and classifiers on RoBERTa."""

    renames = (*RobertaModel.renames, ("classifier", "score"))


class XLMRobertaForSequenceClassification(RobertaForSequenceClassification):
    """Cross-encoders and classifiers on XLM-RoBERTa."""
