from __future__ import annotations

import jax

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.leaves import linear
from jaxis.layers.module import JaxModule
from jaxis.layers.ngram_embedding import NgramEmbedding
from jaxis.layers.ngram_hash import NgramHash, TokenWindow
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope
from jaxis.layers.state_cache_spec import StateCacheSpec

State = tuple[jax.Array] | None
"""The last ids; None without a cache."""


class NgramMean(JaxModule):
    """Mean of a token's embedding and of projected embeddings of its n-grams (arXiv:2601.21204).

    There are `splits` tables for each n from 2 to `order`, of `base + 1`, `base + 3`, ... rows. An n-gram's row is the
    number that its ids are as digits to base `vocab_size`, modulo the number of rows.

    Args:
      end: Id of the end of a document; later tokens see zeros instead of it and of what is before it.
    """

    def __init__(self, scope: LayerScope, *, order: int, splits: int, base: int, end: int | None) -> None:
        size, vocab_size = scope.config["hidden_size"], scope.config["vocab_size"]
        num_tables = splits * (order - 1)
        width = size // num_tables
        self.window = TokenWindow(order, filler=0, ends=end)
        self.embedders, self.post_projs = [], []
        for i in range(num_tables):
            num_rows = base + 2 * i + 1
            powers = tuple(pow(vocab_size, d, num_rows) if d < 2 + i // splits else 0 for d in range(order))
            hashes = NgramHash((powers,), (num_rows,), (0,), "sum")
            self.embedders.append(NgramEmbedding(scope / "embedders" / str(i), hashes, num_rows, width, {}))
            self.post_projs.append(linear(scope / "post_projs" / str(i), width, size, axes=("embed", None)))

    @property
    def state_cache_spec(self) -> StateCacheSpec:
        return StateCacheSpec((self.window.state_array,))

    def __call__(
        self, state: State, x: jax.Array, metadata: AttentionMetadata, input_ids: jax.Array
    ) -> tuple[State, jax.Array]:
        """Returns the updated state and means [T, E] for embeddings x [T, E] of input_ids i32 [T]."""
        of_ids, window = self.window(None if state is None else state[0], input_ids, metadata)
        for embed, project in zip(self.embedders, self.post_projs, strict=True):
            x = x + project(embed(window))
        return None if of_ids is None else (of_ids,), scaled(x, 1 / (1 + len(self.embedders)))
