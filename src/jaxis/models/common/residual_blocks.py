"""Code shared by Kimi K3 and Inkling 2: layers whose blocks read mixtures of stored residuals and the current one."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import DecoderModel


class MixingDecoderLayer(JaxModule):
    """Layer whose two blocks read a mixture of the stored residuals and the current one.

    The residual starts anew every `block_size` layers, where the one before is stored.
    """

    def __init__(self, scope: LayerScope, block_size: int) -> None:
        index = scope.layer_index
        self.num_stored, self.starts_block = -(-index // block_size), index % block_size == 0

    def attend(self, kv_cache: LayerCache, vectors: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """Vectors [T, N, E], the current residual as the last -> the updated cache, and attention's output [T, E]."""
        raise NotImplementedError

    def feed(self, kv_cache: LayerCache, vectors: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """Returns the updated cache and the output of the feed-forward block, as `attend`."""
        raise NotImplementedError

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """x [T, N, E], the stored residuals and the current one as the last -> the updated cache and [T, N, E]."""
        stored, current = x[:, : self.num_stored], x[:, -1:]
        kv_cache, attended = self.attend(kv_cache, jnp.concatenate([stored, current], axis=1), metadata)
        if self.starts_block:
            x = x.at[:, self.num_stored].set(x[:, -1])
            stored, current = x[:, : self.num_stored + 1], attended[:, None]
        else:
            current = current + attended[:, None]
        kv_cache, fed = self.feed(kv_cache, jnp.concatenate([stored, current], axis=1), metadata)
        return kv_cache, x.at[:, -1].set(current[:, 0] + fed)


class MixingModel(DecoderModel):
    """The decoder, whose layers pass on [T, N, E]: the residuals that the blocks of layers store, and the current.

    Attributes:
      block_size_key: Key of config.json with the number of layers of a block.
      make_mixture: Creates the mixture before the final norm.
    """

    block_size_key: ClassVar[str]
    make_mixture: ClassVar[Callable[[LayerScope], Callable[[jax.Array], jax.Array]]]

    def add_parts(self, scope: LayerScope) -> None:
        self.num_streams = -(-len(self.layers) // scope.config[self.block_size_key]) + 1
        self.output_attn_res = type(self).make_mixture(scope / "output_attn_res")

    def first_input(self, x: jax.Array) -> jax.Array:
        return jnp.pad(x[:, None], ((0, 0), (self.num_streams - 1, 0), (0, 0)))

    def last_output(self, x: jax.Array) -> jax.Array:
        return self.output_attn_res(x)
