"""The parts that encoders of texts share: names in checkpoints, token types, and layers with norms after each block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.config.hf_config import HFConfig
from jaxis.kernels.materialize import materialize
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.checkpoint_names import CheckpointNames, Rename
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.leaves import layer_norm
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.norm import JaxLayerNorm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.config_rules import ConfigRules
from jaxis.models.common.decoder import Caches, DecoderModel, DecoderOptions, LayerClass
from jaxis.models.common.interfaces import LoadableWithIterator

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.quantization import QuantizationConfig


class TextEncoder(DecoderModel, LoadableWithIterator, ConfigRules):
    """Base class of encoders, whose positions begin with 0 by default.

    Args:
      vllm_config: The configuration.
      rng: For the initial weights.
      quant_config: Decides how weights are stored and applied; None leaves them as they are.

    Raises:
      ConfigError: config.json asks for something that is not supported.
    """

    layer_class: ClassVar[LayerClass]
    # Renames from checkpoint names to parameter names, and names of an older framework.
    renames: ClassVar[tuple[Rename, ...]] = ()
    other_names: ClassVar[tuple[Rename, ...]] = ()
    # Prefixes in checkpoints of whole models.
    prefixes: ClassVar[tuple[str, ...]] = ()
    # Other tensors of checkpoints, such as heads of training tasks.
    unused: ClassVar[tuple[str, ...]] = ()

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        self.check_config(vllm_config.model_config.hf_config)
        self.checkpoint_names = CheckpointNames(self.renames, self.other_names)
        scope = LayerScope(vllm_config, rng, quant_config, names=self.checkpoint_names)
        super().__init__(scope, type(self).layer_class, self.options(scope))

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        del scope
        return DecoderOptions(norm=Unchanged())

    @classmethod
    def first_position(cls, config: HFConfig) -> int:
        """Returns the position embedding's row of an input's first token."""
        del config
        return 0

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        renamed = ((self.parameter_name(name), tensor) for name, tensor in weights)
        return super().load_weights((name, tensor) for name, tensor in renamed if not name.startswith(self.unused))

    def parameter_name(self, name_in_file: str) -> str:
        for prefix in self.prefixes:
            name_in_file = name_in_file.removeprefix(prefix)
        return self.checkpoint_names.name_here(name_in_file)


class BertEncoder(TextEncoder):
    """An encoder whose embeddings are normed sums of those of words, of token types, if it has any, and of positions.

    Attributes:
      default_token_types: Number of types if config.json does not say.
    """

    default_token_types: ClassVar[int] = 2
    ignored_keys = (("tie_word_embeddings", "a head that predicts words is not loaded"),)

    def add_parts(self, scope: LayerScope) -> None:
        self.embeddings_norm = post_norm(scope)
        num_types = scope.config.get("type_vocab_size", self.default_token_types)
        self.token_type_embeddings = embedding_table(scope, num_types) if num_types else None

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
            embeddings = embeddings + types
        embeddings = materialize(self.with_positions(embeddings, input_ids, attention_metadata))
        return super().__call__(
            kv_caches, input_ids, attention_metadata, inputs_embeds=self.embeddings_norm(embeddings)
        )

    def with_positions(self, embeddings: jax.Array, input_ids: jax.Array, metadata: AttentionMetadata) -> jax.Array:
        """Returns embeddings [T, E] with those of positions; without them, layers have rotary positions."""
        del input_ids, metadata
        return embeddings


class PostNormLayer(JaxModule):
    """`x = norm(x + self_attn(x))`
    `x = norm(x + mlp(x))`
    """

    self_attn: Callable[..., tuple[LayerCache, jax.Array]]
    mlp: Callable[..., jax.Array]

    def __init__(self, scope: LayerScope) -> None:
        self.post_attention_layernorm, self.post_feedforward_layernorm = post_norm(scope), post_norm(scope)

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        kv_cache, attended = self.self_attn(kv_cache, x, metadata)
        x = self.post_attention_layernorm(x + attended)
        return kv_cache, self.post_feedforward_layernorm(x + self.mlp(x, metadata))


class Unchanged(JaxModule):
    """Final norm of models whose layers end with norms: the identity."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def post_norm(scope: LayerScope) -> JaxLayerNorm:
    """Makes one of BERT's norms."""
    return layer_norm(scope, epsilon=scope.config.get("layer_norm_eps", 1e-12))


def embedding_table(scope: LayerScope, size: int) -> nnx.Param[jax.Array]:
    """Makes a table of embeddings, [size, E]."""
    shape = size, scope.config["hidden_size"]
    return make_parameter(scope.rngs, nnx.initializers.normal(0.02), shape, scope.dtype, axes=(None, None))
