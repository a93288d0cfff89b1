"""Description of a step's flat batch for attention, passed down the model as an argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.config.attention_span import AttentionSpan
from jaxis.kernels.batch import Batch
from jaxis.kernels.state_slots import RecurrentStates, StateSlots


@dataclass(frozen=True)
class ScratchCache:
    """Request that layers without a cache use the kernels for serving, with a cache for the duration of the call.

    Results then have the bits of a call with a cache, and can be differentiated. `dtype` is the float type that keys
    and values are rounded to.
    """

    block_size: int
    dtype: DTypeLike


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BidirectionalTokens:
    """Tokens of a batch that see all tokens of their part of the prompt, also later ones.

    Rows are cut into segments where such a part begins or ends. Each segment is then run as a sequence that ends with
    the segment, and whose tokens see everything before that end; this gives bidirectional attention within the part.

    Attributes:
      is_bidirectional: bool [T].
      requests: i32 [T], the request of each segment.
      seq_lens: i32 [T], the end of each segment in its sequence.
      query_start_loc: i32 [T + 1]; segment s's tokens are rows [s] to [s + 1].
      num_segments: i32 scalar; later segments are padding.
    """

    is_bidirectional: jax.Array
    requests: jax.Array
    seq_lens: jax.Array
    query_start_loc: jax.Array
    num_segments: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """Flat batch of T tokens of R requests, without padding between requests.

    Attributes:
      input_positions: i32 [T], the position of each token in its sequence.
      block_tables: i32 [R, max_blocks], the KV cache blocks that hold each request's tokens; None without a cache.
        If layers keep different parts of a sequence, these are the tables of the layers that keep the most.
      seq_lens: i32 [R], the length of each request after this step.
      query_start_loc: i32 [R + 1]; request r's tokens are rows [r] to [r + 1].
      request_distribution: i32 [3]: requests up to the first are decodes (one token each), up to the second prefills,
        up to the third either; the third is the number of requests. Everything after it is padding.
      spans: Attention spans that have tables; `block_tables` belong to the first. Empty: one table for every layer.
      other_block_tables: i32 [R, max_blocks] for each of the other spans. Entries of blocks that no token of the step
        sees are meaningless.
      state_slots: State slots of the requests; None without a cache, or if no layer has a recurrent state.
      bidirectional: Tokens that see later ones; None if no token does.
      rope_positions: i32 [3, T], the time, row and column of each token, as in `jaxis.prompts.rope_positions`; None:
        all three are the token's position in the sequence.
      scratch: Request for the kernels for serving in layers without a cache; None: plain JAX.
    """

    input_positions: jax.Array
    block_tables: jax.Array | None
    seq_lens: jax.Array
    query_start_loc: jax.Array
    request_distribution: jax.Array
    spans: tuple[AttentionSpan, ...] = dataclasses.field(default=(), metadata={"static": True})
    other_block_tables: tuple[jax.Array, ...] = ()
    state_slots: StateSlots | None = None
    bidirectional: BidirectionalTokens | None = None
    rope_positions: jax.Array | None = None
    scratch: ScratchCache | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def batch(self) -> Batch:
        """The tokens and requests as kernels take them, with `block_tables`."""
        tables = self.block_tables
        return Batch(self.seq_lens, tables, self.query_start_loc, self.request_distribution, self.input_positions)

    def batch_for(self, span: AttentionSpan) -> Batch:
        """Returns `batch` with the block tables for this span. Raises ValueError if there are none."""
        return self.batch._replace(block_tables=self.block_tables_for(span))

    @property
    def num_tokens(self) -> jax.Array:
        """Number of tokens of the requests, i32 scalar; later rows are padding."""
        return self.batch.num_tokens

    @property
    def positions_for_rope(self) -> jax.Array:
        """Positions that a rope counts, i32 [T], or [3, T] if the step has `rope_positions`."""
        return self.input_positions if self.rope_positions is None else self.rope_positions

    def states(self, array: jax.Array | None) -> RecurrentStates:
        """Returns the states of the step's requests in an array [num_slots, ...]; None for whole sequences."""
        slots = None if array is None else self.state_slots
        return RecurrentStates(array, slots, self.query_start_loc, self.request_distribution[2])

    def block_tables_for(self, span: AttentionSpan) -> jax.Array:
        """Returns the block tables i32 [R, max_blocks] for this span. Raises ValueError if there are none."""
        if self.block_tables is None:
            raise ValueError("a step without a cache has no block tables")
        if not self.spans:
            return self.block_tables
        return (self.block_tables, *self.other_block_tables)[self.spans.index(span)]

    def of_segments(self, span: AttentionSpan) -> AttentionMetadata:
        """Returns the same tokens as sequences of their own, cut by `bidirectional`, for layers with this span.

        Raises ValueError if no tokens see later ones.
        """
        segments = self.bidirectional
        if segments is None:
            raise ValueError("no tokens of the step see later ones")
        count = segments.num_segments
        return AttentionMetadata(
            input_positions=self.input_positions,
            block_tables=self.block_tables_for(span)[segments.requests],
            seq_lens=segments.seq_lens,
            query_start_loc=segments.query_start_loc,
            request_distribution=jnp.stack([jnp.zeros_like(count), count, count]),
        )

    @classmethod
    def for_whole_sequences(cls, lengths: Sequence[int]) -> AttentionMetadata:
        """Returns metadata for whole sequences in one flat batch, without a cache (`kv_caches=None`)."""
        starts = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.concatenate([np.arange(length) for length in lengths])
        return cls(
            input_positions=jnp.asarray(positions, jnp.int32),
            block_tables=None,
            seq_lens=jnp.asarray(lengths, jnp.int32),
            query_start_loc=jnp.asarray(starts, jnp.int32),
            request_distribution=jnp.asarray([0, len(lengths), len(lengths)], jnp.int32),
        )


def in_consecutive_blocks(metadata: AttentionMetadata, block_size: int) -> tuple[Batch, int]:
    """Returns the batch of whole sequences, in a row in a cache of their own, and its number of blocks."""
    num_tokens, num_requests = len(metadata.input_positions), len(metadata.seq_lens)
    needed = -(-metadata.seq_lens // block_size)
    first = jnp.cumsum(needed) - needed
    num_blocks = -(-num_tokens // block_size) + num_requests
    tables = first[:, None] + jnp.arange(-(-num_tokens // block_size), dtype=jnp.int32)
    tables = jnp.minimum(tables, num_blocks - 1).astype(jnp.int32)
    return metadata.batch._replace(block_tables=tables), num_blocks
