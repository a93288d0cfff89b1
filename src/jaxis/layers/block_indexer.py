from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxis.config.attention_span import FULL_CONTEXT
from jaxis.kernels.index_selection import select_blocks, select_blocks_of_whole_sequences
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.group_indexer import GroupIndexerSizes
from jaxis.layers.indexer import IndexCaches, IndexCacheSpec, IndexKeyCache
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.module import JaxModule
from jaxis.layers.rope import RotaryEmbedding
from jaxis.layers.scope import LayerScope
from jaxis.parallel.mesh import alike_on_each_device


class BlockIndexer(JaxModule):
    """Selects whole blocks of tokens for each key-value head, by the best of their tokens' keys (MiniMax M3).

    Each key-value head has a head of queries; all share one key per token. A token always attends to its own block, one
    of the selected. There is no cache where no context is longer than what is selected.

    Args:
      sizes: Its heads are the key-value heads, its groups the blocks, with the own one.
      rope: Rotates the first `rope.rotary_dim` elements of queries and keys.
    """

    def __init__(self, scope: LayerScope, sizes: GroupIndexerSizes, *, rope: RotaryEmbedding) -> None:
        self.sizes, self.rope = sizes, rope
        self.num_selected = sizes.num_groups * sizes.group_size
        has_cache = scope.max_model_len > self.num_selected
        spec = IndexCacheSpec(sizes.head_dim, sizes.num_heads)
        self.key_cache = IndexKeyCache(spec) if has_cache else None
        hidden_size: int = scope.config["hidden_size"]
        self.q_proj = linear(scope / "q_proj", hidden_size, sizes.num_heads * sizes.head_dim, axes=(None, "embed"))
        self.k_proj = linear(scope / "k_proj", hidden_size, sizes.head_dim, axes=(None, "embed"))
        self.q_norm = rms_norm(scope, sizes.head_dim, add_unit_offset=True)
        self.k_norm = rms_norm(scope, sizes.head_dim, add_unit_offset=True)

    def __call__(
        self, caches: IndexCaches, x: jax.Array, query_input: jax.Array, metadata: AttentionMetadata
    ) -> tuple[IndexCaches, jax.Array]:
        del query_input
        num_tokens, sizes = x.shape[0], self.sizes
        q = self.q_norm(self.q_proj(x).reshape(num_tokens, sizes.num_heads, sizes.head_dim))
        keys = self.k_norm(self.k_proj(x))[:, None]
        groups = {"num_blocks": sizes.num_groups, "group_size": sizes.group_size}
        positions = metadata.input_positions
        if not caches:
            request, _ = metadata.batch.request_of_token()
            q, keys = self.rope(q, keys, positions, metadata.seq_lens[request])
            selection = select_blocks_of_whole_sequences(q, keys[:, 0], metadata.batch, **groups)
            return (), jnp.moveaxis(selection, 0, 1)
        q, keys = self.rope(q, keys, positions)
        select = alike_on_each_device(functools.partial(select_blocks, **groups))
        key_cache, selection = select(q, keys[:, 0], caches[0], metadata.batch_for(FULL_CONTEXT))
        return (key_cache,), selection
