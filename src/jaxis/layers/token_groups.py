"""Rows of groups of tokens, cached beside a layer's keys and values: what a family computes of each closed group."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.typing import DTypeLike

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.kernels.paged_cache import CacheLayout, PagedCache
from jaxis.kernels.token_groups import (
    ClosedGroups,
    Combine,
    combine_cached,
    combine_whole_sequences,
    row_cache_layout,
    write_groups,
    write_rows,
)
from jaxis.layers.attention_metadata import AttentionMetadata


@dataclass(frozen=True)
class RowCacheSpec:
    """Cache of a row per token, of which only those of the span are read: the rows of groups that are not closed yet.

    It is paged like keys and values: drafts, chunks of prompts and shared prefixes need nothing of their own. Where
    groups do not overlap, the span is a chunk, and nothing is open at the end of a block.

    Attributes:
      size: Elements of a row.
      span: The tokens whose rows are read; see `TokenGroups.span`.
    """

    size: int
    span: AttentionSpan

    def layout(self, block_size: int, dtype: DTypeLike) -> CacheLayout:
        return row_cache_layout(block_size, self.size, dtype)

    def on_devices(self, tensor_parallel_size: int) -> RowCacheSpec:
        del tensor_parallel_size
        return self


@dataclass(frozen=True)
class TokenGroups:
    """Groups of consecutive tokens, each with a row that `combine` computes of the rows of tokens.

    Attributes:
      size: G, tokens of a group. Group g has the tokens from g * G on.
      window: W, the last tokens up to a group's end whose rows it is computed of; G or more.
    """

    size: int
    window: int

    @property
    def span(self) -> AttentionSpan:
        """The tokens whose rows a token's group needs: the span of the cache of rows."""
        if self.window == self.size:
            return AttentionSpan(attention_chunk_size=self.size)
        return AttentionSpan(sliding_window=self.window)

    def closed_in(self, metadata: AttentionMetadata) -> ClosedGroups:
        """Returns the groups whose last tokens are in the step."""
        return ClosedGroups.of(metadata.batch, self.size)

    def combine_whole_sequences(
        self, combine: Combine, rows: jax.Array, metadata: AttentionMetadata
    ) -> tuple[ClosedGroups, jax.Array]:
        """Returns the groups of whole sequences, and their rows [C, E], for the rows [T, D] of their tokens."""
        closed = self.closed_in(metadata)
        return closed, combine_whole_sequences(combine, rows, closed, group_size=self.size, window=self.window)

    def update(
        self,
        combine: Combine,
        rows: jax.Array,
        row_cache: PagedCache,
        group_cache: PagedCache,
        metadata: AttentionMetadata,
        *,
        row_span: AttentionSpan | None = None,
    ) -> tuple[PagedCache, PagedCache]:
        """Writes the rows [T, D] of a step's tokens, and the rows of the groups that they close, into their caches.

        `row_span` is the span of the cache of rows if it is not `span`, but one that sees more.
        """
        row_cache, closed, values = self.combine(combine, rows, row_cache, metadata, row_span=row_span)
        return row_cache, self.write(values, closed, group_cache, metadata)

    def combine(
        self,
        combine: Combine,
        rows: jax.Array,
        row_cache: PagedCache,
        metadata: AttentionMetadata,
        *,
        row_span: AttentionSpan | None = None,
    ) -> tuple[PagedCache, ClosedGroups, jax.Array]:
        """Writes the rows of a step's tokens, and returns their cache, the groups that they close, and these' rows."""
        batch = metadata.batch_for(self.span if row_span is None else row_span)
        row_cache = write_rows(rows, row_cache, batch)
        closed, sizes = self.closed_in(metadata), {"group_size": self.size, "window": self.window}
        values = combine_cached(combine, row_cache, batch.block_tables, closed, **sizes)
        return row_cache, closed, values

    def write(
        self, values: jax.Array, closed: ClosedGroups, group_cache: PagedCache, metadata: AttentionMetadata
    ) -> PagedCache:
        """Writes the rows [C, E] of closed groups."""
        tables = metadata.block_tables_for(FULL_CONTEXT)
        return write_groups(values, group_cache, tables, closed, group_size=self.size)
