"""The parts that encoders of texts share: names in checkpoints, token types, and layers with norms after each block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.config.hf_config import HFConfig
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.checkpoint_names import CheckpointNames, Rename
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.leaves import layer_norm
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.norm import JaxLayerNorm
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import DecoderModel
from jaxis.models.common.interfaces import LoadableWithIterator

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.quantization import QuantizationConfig


class TextEncoder(DecoderModel, LoadableWithIterator):
    """Base class of encoders. Their positions begin with 0, and all inputs have one token type, by default."""

    # Renames from checkpoint names to parameter names, and names of an older framework.
    renames: ClassVar[tuple[Rename, ...]] = ()
    other_names: tuple[Rename, ...] = ()
    # Prefixes in checkpoints of whole models.
    prefixes: ClassVar[tuple[str, ...]] = ()
    # Other tensors of checkpoints, such as heads of training tasks.
    unused: ClassVar[tuple[str, ...]] = ()
    token_type_embeddings: nnx.Param[jax.Array] | None = None

    def make_scope(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None) -> LayerScope:
        """Sets the checkpoint's names, and returns the scope of the model."""
        self.checkpoint_names = CheckpointNames(self.renames, self.other_names)
        return LayerScope(vllm_config, rng, quant_config, names=self.checkpoint_names)

    @classmethod
    def first_position(cls, config: HFConfig) -> int:
        """Returns the position embedding's row of an input's first token."""
        del config
        return 0

    @property
    def num_token_types(self) -> int:
        return 1 if self.token_type_embeddings is None else self.token_type_embeddings.get_value().shape[0]

    def embed_types(self, input_ids: jax.Array, token_types: jax.Array | None) -> jax.Array:
        """Returns the embeddings of tokens and of their types, [T, E]; None stands for the first type."""
        embeddings = self.embed_tokens(input_ids)
        if self.token_type_embeddings is None:
            return embeddings
        table = self.token_type_embeddings[...]
        types = table[0] if token_types is None else jnp.where(token_types[:, None] == 1, table[1], table[0])
        return embeddings + types

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        renamed = ((self.parameter_name(name), tensor) for name, tensor in weights)
        return super().load_weights((name, tensor) for name, tensor in renamed if not name.startswith(self.unused))

    def parameter_name(self, name_in_file: str) -> str:
        for prefix in self.prefixes:
            name_in_file = name_in_file.removeprefix(prefix)
        return self.checkpoint_names.name_here(name_in_file)


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
