"""Attention to compressed entries, and selections of them, that layers share (DeepSeek V4.1).

A layer makes entries and a key of each, selects among the last ones made, or takes the last selection.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxis.config.attention_span import FULL_CONTEXT
from jaxis.kernels.compressed_attention import GroupEntries
from jaxis.kernels.index_selection.candidates import (
    CandidateBlocks,
    select_in_stages,
    select_in_stages_of_whole_sequences,
)
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.compressed_attention import (
    CompressedAttention,
    EntryIndexer,
    groups_seen,
    rotate_last,
)
from jaxis.layers.indexer import IndexCacheSpec, IndexerSizes, IndexKeyCache
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.scope import LayerScope, never_quantized
from jaxis.layers.token_groups import TokenGroups
from jaxis.parallel.mesh import alike_on_each_device


class SharedEntries(NamedTuple):
    """Entries, and a selection of them, that layers hand on within a step; without caches, of whole sequences.

    Attributes:
      entries, keys: The caches of entries and keys, or the arrays [C, D].
      selection: i32 [T, K], the groups that a token attends to, or bool [T, C].
      candidates: The blocks, or groups, that later indexers score, as in `Stages`.
    """

    entries: Any
    keys: Any
    selection: Any = None
    candidates: Any = None


class SharedEntryIndexer(EntryIndexer):
    """An indexer whose keys are projected from entries before their rope, by itself or by that of an earlier layer.

    Args:
      options: Arguments of `EntryIndexer`.
      entry_size: Elements of an entry; None if an earlier layer makes the keys.
      blocks: Candidates that it chooses, or selects among; None: it selects among all groups.
    """

    def __init__(
        self,
        scope: LayerScope,
        sizes: IndexerSizes,
        *,
        entry_size: int | None,
        blocks: CandidateBlocks | None,
        **options: Any,
    ) -> None:
        super().__init__(scope, sizes, **options)
        self.blocks = blocks
        if entry_size is not None:
            spec = IndexCacheSpec(sizes.head_dim, sizes.num_heads, self.group_size, in_plain_jax=True)
            self.key_cache = IndexKeyCache(spec)
            self.k_proj = linear(never_quantized(scope / "k_proj"), entry_size, sizes.head_dim, axes=(None, None))
            self.k_norm = rms_norm(scope, sizes.head_dim)

    def keys(self, latents: jax.Array, first_position: jax.Array) -> jax.Array:
        """Returns the keys float32 [N, D] of groups, for their entries [N, entry_size] before the rope."""
        keys = self.k_norm(self.k_proj(latents))[:, None]
        return rotate_last(self.rope, keys, first_position)[:, 0].astype(jnp.float32)

    def select_shared(
        self, shared: SharedEntries, x: jax.Array, latent: jax.Array, metadata: AttentionMetadata, *, has_caches: bool
    ) -> SharedEntries:
        """Returns `shared` with a selection, and with candidates if they are chosen here."""
        operands = (*self.queries(x, latent, metadata.input_positions), shared.keys, shared.candidates)
        options = {"num_groups": self.sizes.num_selected, "blocks": self.blocks}
        if has_caches:
            select = alike_on_each_device(functools.partial(select_in_stages, group_size=self.group_size, **options))
            found = select(*operands, metadata.batch_for(FULL_CONTEXT))
        else:
            closed = TokenGroups(self.group_size, self.group_size).closed_in(metadata)
            sees = groups_seen(closed, metadata, x.shape[0])
            found = select_in_stages_of_whole_sequences(*operands, closed, sees, **options)
        return SharedEntries(shared.entries, shared.keys, *found)


class SharedEntriesAttention(CompressedAttention):
    """Attention to a window's entries, and to selected ones of the last layer with a compressor.

    A layer with a compressor also has an indexer. `kv_cache` has the caches of the window, of entries, of their rows
    and of their keys, as far as the layer has them, and last what layers hand on.
    """

    hands_on_selection = True
    indexer: SharedEntryIndexer | None

    def _combine(self, rows: jax.Array, exists: jax.Array, first_position: jax.Array) -> jax.Array:
        """Returns entries and keys of groups, [N, D + index D]; see `Combine` of `kernels.token_groups`."""
        assert self.compressor is not None
        assert self.indexer is not None
        latents = self.compressor.latents(rows, exists)
        parts = self.compressor.rotated(latents, first_position), self.indexer.keys(latents, first_position)
        return jnp.concatenate(parts, axis=-1)

    def _share(self, caches: list[Any], x: jax.Array, latent: jax.Array, metadata: AttentionMetadata) -> SharedEntries:
        """Returns what the layer reads and hands on; updates its caches, if there are any, in the list."""
        has_caches = caches[0] is not None
        if self.compressor is not None:
            groups, rows = self.compressor.groups, self.compressor.rows(x)
            if has_caches and self.compressor.row_cache is not None:
                caches[2], closed, values = groups.combine(self._combine, rows, caches[2], metadata)
            else:
                closed, values = groups.combine_whole_sequences(self._combine, rows, metadata)
            parts = jnp.split(values, [self.sizes.head_dim], axis=-1)
            if has_caches:
                for place, part in zip((1, -2), parts, strict=True):
                    caches[place] = groups.write(part, closed, caches[place], metadata)
                parts = [caches[1], caches[-2]]
            caches[-1] = SharedEntries(*parts)
        if self.indexer is not None:
            caches[-1] = self.indexer.select_shared(caches[-1], x, latent, metadata, has_caches=has_caches)
        return caches[-1]

    def groups_from_caches(
        self, caches: list[Any], x: jax.Array, latent: jax.Array, metadata: AttentionMetadata
    ) -> GroupEntries:
        shared = self._share(caches, x, latent, metadata)
        return GroupEntries(shared.entries, self.group_size, metadata.block_tables_for(FULL_CONTEXT), shared.selection)

    def groups_within_sequences(
        self, caches: list[Any], x: jax.Array, latent: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array, jax.Array]:
        shared = self._share(caches, x, latent, metadata)
        return shared.entries, shared.selection
