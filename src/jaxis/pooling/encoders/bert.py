"""BERT (arXiv:1810.04805) and RoBERTa (arXiv:1907.11692): learned positions, norms after each block."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.config.attention_span import WHOLE_SEQUENCE
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.kernels.materialize import materialize
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import UngatedMLP, activation_function
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import Caches, DecoderOptions
from jaxis.pooling.encoders.first_token_head import with_first_token_head
from jaxis.pooling.encoders.text_encoder import PostNormLayer, TextEncoder, Unchanged, embedding_table, post_norm

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.quantization import QuantizationConfig


class BertLayer(PostNormLayer):
    """`PostNormLayer` without rotary positions, and with biases."""

    def __init__(self, scope: LayerScope) -> None:
        self.self_attn = GroupedQueryAttention(scope / "self_attn", use_rope=False, use_bias=True, span=WHOLE_SEQUENCE)
        activation = activation_function(scope.config.get("hidden_act", "gelu"))
        self.mlp = UngatedMLP(scope / "mlp", activation=activation, use_bias=True)
        super().__init__(scope)


class BertModel(TextEncoder):
    """Embeddings of words, positions and token types, then layers.

    Args:
      vllm_config: The configuration.
      rng: For the initial weights.
      quant_config: Decides how weights are stored and applied; None leaves them as they are.

    Raises:
      ConfigError: config.json asks for something that is not supported.
    """

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
    # Checkpoints of whole models have a prefix, and very old ones use another framework's names.
    prefix: ClassVar[str] = "bert"
    other_names = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
    unused = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids")

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        self.check_config(vllm_config.model_config.hf_config)
        prefixed = tuple((f"{self.prefix}.{name}", name) for name in ("embeddings", "encoder", "pooler"))
        self.other_names = (*prefixed, *self.other_names)
        scope = self.make_scope(vllm_config, rng, quant_config)
        super().__init__(scope, BertLayer, DecoderOptions(norm=Unchanged()))
        self.embeddings_norm = post_norm(scope)
        self.position_embeddings = embedding_table(scope, scope.config.get("max_position_embeddings", 512))
        self.token_type_embeddings = embedding_table(scope, scope.config.get("type_vocab_size", 2))

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        """Declares keys of config.json that are unused (`ignore`) or supported with some values only (`expect`).

        Raises:
          ConfigError: A key has another value.
        """
        config.expect("position_embedding_type", "absolute")
        config.ignore("tie_word_embeddings", because="a head that predicts words is not loaded")
        config.expect_all(is_decoder=False, add_cross_attention=False)

    def __call__(
        self,
        kv_caches: Caches,
        input_ids: jax.Array,
        attention_metadata: AttentionMetadata,
        *,
        token_types: jax.Array | None = None,
    ) -> tuple[Caches, jax.Array, list[jax.Array]]:
        """input_ids [T], whole texts -> the updated caches, and hidden states [T, E]; see `TakesTokenTypes`."""
        rows = self.position_rows(input_ids, attention_metadata)
        embeddings = self.embed_types(input_ids, token_types)
        embeddings = materialize(embeddings + self.position_embeddings[...][rows])
        return super().__call__(
            kv_caches, input_ids, attention_metadata, inputs_embeds=self.embeddings_norm(embeddings)
        )

    def position_rows(self, input_ids: jax.Array, metadata: AttentionMetadata) -> jax.Array:
        """i32 [T]: row of each token in the table of positions."""
        del input_ids
        return metadata.input_positions


class RobertaModel(BertModel):
    """BERT with positions that start after the padding token's id and count only tokens that are not padding."""

    prefix = "roberta"

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        super().__init__(vllm_config, rng, quant_config)
        self._padding_id = self.first_position(vllm_config.model_config.hf_config) - 1

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
