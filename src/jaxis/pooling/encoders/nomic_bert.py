"""Encoders that are BERT with rotary positions and a gated feed-forward block, norms after each block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.config.attention_span import WHOLE_SEQUENCE
from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config
from jaxis.kernels.materialize import materialize
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.checkpoint_names import CheckpointNames, Rename
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import layer_norm
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.norm import JaxLayerNorm
from jaxis.layers.qkv_packing import PACKED
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import Caches, DecoderModel, DecoderOptions
from jaxis.models.common.interfaces import LoadableWithIterator
from jaxis.pooling.encoders.first_token_head import with_first_token_head

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.quantization import QuantizationConfig


class RotaryBertLayer(JaxModule):
    """`x = norm(x + self_attn(x))`
    `x = norm(x + mlp(x))`
    """

    def __init__(self, scope: LayerScope) -> None:
        rope = rope_config(scope.config, default_theta=1000.0)
        self.self_attn = GroupedQueryAttention(
            scope / "self_attn", rope_settings=rope, packing=PACKED, span=WHOLE_SEQUENCE
        )
        self.post_attention_layernorm = post_norm(scope)
        self.mlp = GatedMLP(scope / "mlp", activation="silu")
        self.post_mlp_layernorm = post_norm(scope)

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        kv_cache, attended = self.self_attn(kv_cache, x, metadata)
        x = self.post_attention_layernorm(x + attended)
        return kv_cache, self.post_mlp_layernorm(x + self.mlp(x, metadata))


def post_norm(scope: LayerScope) -> JaxLayerNorm:
    """Makes one of BERT's norms."""
    return layer_norm(scope, epsilon=scope.config.get("layer_norm_eps", 1e-12))


class NomicBertModel(DecoderModel, LoadableWithIterator):
    """nomic-embed-text v1 and v1.5 (arXiv:2402.01613).

    Args:
      vllm_config: The configuration.
      rng: For the initial weights.
      quant_config: Decides how weights are stored and applied; None leaves them as they are.

    Raises:
      ConfigError: config.json asks for something that is not supported.
    """

    renames: ClassVar[tuple[Rename, ...]] = (
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
        ("norm2", "post_mlp_layernorm"),
    )
    # Prefixes in checkpoints of whole models.
    prefixes: ClassVar[tuple[str, ...]] = ("nomic_bert.", "bert.")
    default_token_types: ClassVar[int] = 2
    layer_class: ClassVar[type[JaxModule]] = RotaryBertLayer
    # Heads of training tasks.
    unused: ClassVar[tuple[str, ...]] = ("pooler.", "cls.", "embeddings.position_ids")

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        self.check_config(vllm_config.model_config.hf_config)
        self.checkpoint_names = CheckpointNames(self.renames)
        scope = LayerScope(vllm_config, rng, quant_config, names=self.checkpoint_names)
        super().__init__(scope, self.layer_class, DecoderOptions(norm=Unchanged()))
        self.embeddings_norm = post_norm(scope)
        shape = scope.config.get("type_vocab_size", self.default_token_types), scope.config["hidden_size"]
        self.token_type_embeddings = None
        if shape[0]:
            self.token_type_embeddings = make_parameter(
                scope.rngs, nnx.initializers.normal(0.02), shape, scope.dtype, axes=(None, None)
            )

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        """Declares keys of config.json that are unused (`ignore`) or supported with some values only (`expect`).

        Raises:
          ConfigError: A key has another value.
        """
        config.expect("hidden_act", "silu", "swiglu")
        for key in ("prenorm", "parallel_block", "causal", "use_rms_norm", "rotary_emb_interleaved"):
            config.expect(key, False)
        for key in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "scale_attn_by_inverse_layer_idx"):
            config.expect(key, False)
        config.expect("rotary_emb_fraction", 1.0)
        for key in ("rotary_emb_scale_base", "rotary_scaling_factor", "num_experts", "moe_every_n_layers"):
            config.expect(key, None, 0)
        config.ignore("reorder_and_upcast_attn", because="scores are float32")
        config.ignore("tie_word_embeddings", because="a head that predicts words is not loaded")
        for key in ("dense_seq_output", "use_xentropy"):
            config.ignore(key, because="a head that predicts words is not loaded")
        config.ignore("pad_vocab_size_multiple", because="vocab_size has the padding")
        config.ignore("max_trained_positions", because="positions are rotary")

    @classmethod
    def first_position(cls, config: HFConfig) -> int:
        del config
        return 0

    @property
    def num_token_types(self) -> int:
        return 1 if self.token_type_embeddings is None else self.token_type_embeddings.get_value().shape[0]

    def __call__(
        self,
        kv_caches: Caches,
        input_ids: jax.Array,
        attention_metadata: AttentionMetadata,
        *,
        token_types: jax.Array | None = None,
    ) -> tuple[Caches, jax.Array, list[jax.Array]]:
        """input_ids [T], whole texts -> the updated caches, and hidden states [T, E]; see `TakesTokenTypes`."""
        embeddings = self.embed_tokens(input_ids)
        if self.token_type_embeddings is not None:
            table = self.token_type_embeddings[...]
            types = table[0] if token_types is None else jnp.where(token_types[:, None] == 1, table[1], table[0])
            embeddings = materialize(embeddings + types)
        embeddings = self.embeddings_norm(embeddings)
        return super().__call__(kv_caches, input_ids, attention_metadata, inputs_embeds=embeddings)

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        renamed = ((self.parameter_name(name), tensor) for name, tensor in weights)
        return super().load_weights((name, tensor) for name, tensor in renamed if not name.startswith(self.unused))

    def parameter_name(self, name_in_file: str) -> str:
        for prefix in self.prefixes:
            name_in_file = name_in_file.removeprefix(prefix)
        return self.checkpoint_names.name_here(name_in_file)


class NomicBertForSequenceClassification(with_first_token_head(NomicBertModel)):
    """Cross-encoders and classifiers on Nomic's BERT: a head on the first token."""

    renames = (*NomicBertModel.renames, ("pooler", "score"), ("classifier", "score.out_proj"))
    unused = ("cls.", "embeddings.position_ids")


class Unchanged(JaxModule):
    """Final norm of models whose layers end with norms: the identity."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x
