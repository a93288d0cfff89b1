"""DeepSeek V4's attention: to the entries of a window, and to entries that are compressed from groups of tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.kernels.batch import sees_in_request
from jaxis.kernels.compressed_attention import (
    GroupEntries,
    attention_within_sequences,
    compressed_attention,
)
from jaxis.kernels.index_selection import best_groups, select_from_whole_sequences
from jaxis.kernels.paged_cache import PagedCache
from jaxis.kernels.token_groups import ClosedGroups, ordered_softmax_sum, write_rows
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.indexer import IndexCacheSpec, IndexerSizes, IndexKeyCache, head_weights
from jaxis.layers.leaves import latent_up_projection, linear, rms_norm
from jaxis.layers.linear import apply_together
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.norm import UnweightedRmsNorm
from jaxis.layers.rope import RotaryEmbedding
from jaxis.layers.scope import LayerScope, never_quantized
from jaxis.layers.token_groups import RowCacheSpec, TokenGroups
from jaxis.parallel.mesh import alike_on_each_device


@dataclass(frozen=True)
class CompressedAttentionSizes:
    """Dimensions of attention to entries of D elements, which all heads share.

    Attributes:
      num_heads: H.
      head_dim: D, of queries and entries. The rope rotates the last of them.
      q_lora_rank: Size of the queries' latent.
      window: W, the tokens up to itself whose own entries a token attends to.
      output_groups: Groups of consecutive heads, whose outputs are projected group by group first.
      o_lora_rank: Size of that projection's output, for each group.
    """

    num_heads: int
    head_dim: int
    q_lora_rank: int
    window: int
    output_groups: int
    o_lora_rank: int


class Compressor(JaxModule):
    """One entry [D] of each closed group of tokens: a sum, weighted for each dimension by a softmax, then a norm.

    It rotates the last dimensions of an entry by the position of the group's first token.

    Args:
      num_heads: Query heads that an entry is multiplied with.
      overlaps: True if an entry is of the tokens of the group before, too: these have weights and values of their own,
        the first half of each projection.
      has_position_bias: True if the softmax's logits have a learned part of each place in the group.

    A token that is a group by itself has no weight, and no row in a cache.
    """

    def __init__(
        self,
        scope: LayerScope,
        *,
        head_dim: int,
        num_heads: int,
        group_size: int,
        overlaps: bool = False,
        has_position_bias: bool = True,
        rope: RotaryEmbedding,
    ) -> None:
        self.head_dim, self.overlaps, self.rope, self.dtype = head_dim, overlaps, rope, scope.dtype
        self.groups = TokenGroups(group_size, 2 * group_size if overlaps else group_size)
        size = 2 * head_dim if overlaps else head_dim
        # In the order of the caches, as their names are: flax sorts the modules of a model that it puts together.
        self.entry_cache = IndexKeyCache(IndexCacheSpec(head_dim, num_heads, group_size, in_plain_jax=True))
        self.row_cache = IndexKeyCache(RowCacheSpec(2 * size, self.groups.span)) if group_size > 1 else None
        hidden_size: int = scope.config["hidden_size"]
        self.kv_proj = linear(never_quantized(scope / "kv_proj"), hidden_size, size, axes=(None, "embed"))
        self.gate_proj = None
        if group_size > 1:
            self.gate_proj = linear(never_quantized(scope / "gate_proj"), hidden_size, size, axes=(None, "embed"))
        self.position_bias = None
        if has_position_bias:
            self.position_bias = make_parameter(
                scope.rngs, nnx.initializers.zeros, (group_size, size), jnp.float32, axes=(None, None)
            )
        self.kv_norm = rms_norm(scope, head_dim)

    def rows(self, x: jax.Array) -> jax.Array:
        """Returns what entries are computed of: [T, 2 D] for x [T, E], or [T, 4 D]; [T, D] if tokens are groups."""
        if self.gate_proj is None:
            return self.kv_proj(x)
        return jnp.concatenate(apply_together(x, self.kv_proj, self.gate_proj), axis=-1)

    def combine(self, rows: jax.Array, exists: jax.Array, first_position: jax.Array) -> jax.Array:
        """Returns the entries [N, D] of groups; see `Combine` of `kernels.token_groups`."""
        return self.rotated(self.latents(rows, exists), first_position)

    def latents(self, rows: jax.Array, exists: jax.Array) -> jax.Array:
        """Returns the entries [N, D] before the rope, for `combine`'s arguments."""
        if self.gate_proj is None:
            return self.kv_norm(rows[:, 0].astype(self.dtype))
        kv, gate = jnp.split(rows, 2, axis=-1)
        if self.position_bias is not None:
            gate = gate + jnp.tile(self.position_bias[...], (rows.shape[1] // self.groups.size, 1))
        if self.overlaps:
            kv, gate = (
                jnp.concatenate(
                    [each[:, : self.groups.size, : self.head_dim], each[:, self.groups.size :, self.head_dim :]], axis=1
                )
                for each in (kv, gate)
            )
        gate = jnp.where(exists[..., None], gate, jnp.finfo(jnp.float32).min)
        return self.kv_norm(ordered_softmax_sum(gate, kv).astype(self.dtype))

    def rotated(self, latents: jax.Array, first_position: jax.Array) -> jax.Array:
        """Returns float32 [N, D]."""
        return rotate_last(self.rope, latents[:, None], first_position)[:, 0].astype(jnp.float32)

    def update(
        self, caches: list[PagedCache], x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[PagedCache, PagedCache]:
        """Returns the updated caches, of entries and of rows."""
        entry_cache, row_cache = caches
        row_cache, entry_cache = self.groups.update(self.combine, self.rows(x), row_cache, entry_cache, metadata)
        return entry_cache, row_cache


class EntryIndexer(JaxModule):
    """Selects the compressed entries that score best, by a key of each.

    Args:
      query_size: Elements of attention's normed query latent, from which the indexer's queries are projected.
      sizes: Its dimensions; `num_selected` is the most groups that a token attends to.
    """

    def __init__(
        self, scope: LayerScope, sizes: IndexerSizes, *, query_size: int, group_size: int, rope: RotaryEmbedding
    ) -> None:
        self.sizes, self.group_size, self.rope = sizes, group_size, rope
        self.q_b_proj = linear(scope / "q_b_proj", query_size, sizes.num_heads * sizes.head_dim, axes=(None, None))
        self.weights_proj = head_weights(scope / "weights_proj", sizes.num_heads)

    def queries(self, x: jax.Array, latent: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns queries [T, H, D] and the heads' weights float32 [T, H]."""
        sizes = self.sizes
        q = self.q_b_proj(latent).reshape(x.shape[0], sizes.num_heads, sizes.head_dim)
        weights = self.weights_proj(x.astype(jnp.float32)) * (sizes.num_heads * sizes.head_dim) ** -0.5
        return rotate_last(self.rope, q, positions), weights

    def select(self, key_cache: PagedCache, x: jax.Array, latent: jax.Array, metadata: AttentionMetadata) -> jax.Array:
        """Returns the selected groups i32 [T, K], ascending, then -1."""
        of_groups = {"num_groups": self.sizes.num_selected, "group_size": self.group_size}
        select = alike_on_each_device(functools.partial(best_groups, **of_groups))
        return select(*self.queries(x, latent, metadata.input_positions), key_cache, metadata.batch_for(FULL_CONTEXT))


class CompressedIndexer(EntryIndexer):
    """An indexer whose keys are compressed from the same groups by a compressor of its own."""

    def __init__(
        self, scope: LayerScope, sizes: IndexerSizes, *, query_size: int, group_size: int, rope: RotaryEmbedding
    ) -> None:
        super().__init__(scope, sizes, query_size=query_size, group_size=group_size, rope=rope)
        self.compressor = Compressor(
            scope / "compressor",
            head_dim=sizes.head_dim,
            num_heads=sizes.num_heads,
            group_size=group_size,
            overlaps=True,
            rope=rope,
        )


class CompressedAttention(JaxModule):
    """Attention of H heads to entries that are keys and values at once (DeepSeek V4).

    A token attends to the entries of a window, and, with a compressor, to those of all closed groups of tokens, or of
    the groups that an indexer selects. Entries are rotated, so attention's output is rotated back. `kv_cache` has the
    cache of the window, those of the compressor, and those of the indexer's: of entries, of rows.

    Args:
      rope: Rotates the last dimensions of queries and entries.
      group_size: Tokens of a compressed entry; 0 without such entries.
      norms_queries: True if the queries of each head are normed, without weights.
    """

    def __init__(
        self,
        scope: LayerScope,
        sizes: CompressedAttentionSizes,
        *,
        rope: RotaryEmbedding,
        group_size: int,
        compressor: Compressor | None = None,
        indexer: EntryIndexer | None = None,
        norms_queries: bool = True,
    ) -> None:
        self.sizes, self.rope, self.group_size = sizes, rope, group_size
        self.compressor, self.indexer = compressor, indexer
        hidden_size: int = scope.config["hidden_size"]
        size, group = sizes.num_heads * sizes.head_dim, sizes.output_groups
        self.q_a_proj = linear(scope / "q_a_proj", hidden_size, sizes.q_lora_rank, axes=(None, "embed"))
        self.q_a_norm = rms_norm(scope, sizes.q_lora_rank)
        self.q_b_proj = linear(scope / "q_b_proj", sizes.q_lora_rank, size, axes=("heads", None))
        self.q_b_norm = UnweightedRmsNorm(epsilon=scope.config["rms_norm_eps"]) if norms_queries else None
        self.kv_proj = linear(scope / "kv_proj", hidden_size, sizes.head_dim, axes=(None, "embed"))
        self.kv_norm = rms_norm(scope, sizes.head_dim)
        self.sinks = make_parameter(
            scope.rngs, nnx.initializers.zeros, (sizes.num_heads,), jnp.float32, axes=("heads",)
        )
        # A matrix [rank, H / groups * D] of each group.
        self.o_a_proj = latent_up_projection(scope / "o_a_proj", group, size // group, 0, sizes.o_lora_rank)
        self.o_b_proj = linear(scope / "o_b_proj", group * sizes.o_lora_rank, hidden_size, axes=("embed", "heads"))

    @property
    def span(self) -> AttentionSpan:
        return AttentionSpan(sliding_window=self.sizes.window)

    @property
    def kv_cache_spec(self) -> RowCacheSpec:
        """Specification of the cache of the window."""
        return RowCacheSpec(self.sizes.head_dim, self.span)

    def __call__(self, kv_cache: Any, x: jax.Array, metadata: AttentionMetadata) -> tuple[Any, jax.Array]:
        """Returns the updated caches and [T, E] for x [T, E]."""
        caches = list(kv_cache) if isinstance(kv_cache, tuple) else [kv_cache]
        positions, num_tokens, sizes = metadata.input_positions, x.shape[0], self.sizes
        latent, entries = apply_together(x, self.q_a_proj, self.kv_proj)
        latent = self.q_a_norm(latent)
        q = self.q_b_proj(latent).reshape(num_tokens, sizes.num_heads, sizes.head_dim)
        if self.q_b_norm is not None:
            q = self.q_b_norm(q)
        q = rotate_last(self.rope, q, positions)
        entries = self._rotated(entries, positions)
        if caches[0] is None:
            out = self._within_sequences(caches, q, entries, x, latent, metadata)
        else:
            out = self._from_caches(caches, q, entries, x, latent, metadata)
        out = rotate_last(self.rope, out, -positions)
        out = self.o_a_proj.values_of(out.reshape(num_tokens, sizes.output_groups, -1))
        out = self.o_b_proj(out.reshape(num_tokens, -1))
        return tuple(caches) if isinstance(kv_cache, tuple) else caches[0], out

    def _rotated(self, entries: jax.Array, positions: jax.Array) -> jax.Array:
        return rotate_last(self.rope, self.kv_norm(entries)[:, None], positions)[:, 0]

    def last_seen(self, metadata: AttentionMetadata) -> jax.Array:
        """Returns i32 [T], the last position whose entry a token sees."""
        return metadata.input_positions

    def _from_caches(
        self,
        caches: list[PagedCache],
        q: jax.Array,
        entries: jax.Array,
        x: jax.Array,
        latent: jax.Array,
        metadata: AttentionMetadata,
    ) -> jax.Array:
        """Returns [T, H, D]; updates the caches in their list."""
        batch = metadata.batch_for(self.span)
        caches[0] = write_rows(entries, caches[0], batch)
        return compressed_attention(
            q,
            self.sinks[...],
            caches[0],
            self.groups_from_caches(caches, x, latent, metadata),
            batch._replace(positions=self.last_seen(metadata)),
            window=self.sizes.window,
            scale=self.sizes.head_dim**-0.5,
        )

    def groups_from_caches(
        self, caches: list[Any], x: jax.Array, latent: jax.Array, metadata: AttentionMetadata
    ) -> GroupEntries | None:
        """Returns the entries of groups that tokens attend to; updates their caches in the list."""
        if self.compressor is None:
            return None
        caches[1:3] = self.compressor.update(caches[1:3], x, metadata)
        selection = None
        if isinstance(self.indexer, CompressedIndexer):
            caches[3:5] = self.indexer.compressor.update(caches[3:5], x, metadata)
            selection = self.indexer.select(caches[3], x, latent, metadata)
        tables = metadata.block_tables_for(FULL_CONTEXT)
        return GroupEntries(caches[1], self.group_size, tables, selection)

    def _within_sequences(
        self,
        caches: list[Any],
        q: jax.Array,
        entries: jax.Array,
        x: jax.Array,
        latent: jax.Array,
        metadata: AttentionMetadata,
    ) -> jax.Array:
        """Returns [T, H, D] for whole sequences, without caches."""
        num_tokens = x.shape[0]
        request, valid = metadata.batch.request_of_token()
        token = jnp.arange(num_tokens)
        distance = token[:, None] - token
        sees = sees_in_request(request, valid) & (distance < self.sizes.window)
        # Padding tokens see themselves, to keep their rows finite.
        sees |= (distance == 0) & ~valid
        groups = self.groups_within_sequences(caches, x, latent, metadata)
        if groups is None:
            groups = jnp.zeros((0, self.sizes.head_dim), entries.dtype), jnp.zeros((num_tokens, 0), bool)
        scale = self.sizes.head_dim**-0.5
        return attention_within_sequences(q, self.sinks[...], entries, sees, *groups, scale=scale)

    def groups_within_sequences(
        self, caches: list[Any], x: jax.Array, latent: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array, jax.Array] | None:
        """Returns the entries [C, D] of groups of whole sequences, and bool [T, C], where a token attends to one."""
        del caches
        if self.compressor is None:
            return None
        groups = self.compressor.groups
        closed, entries = groups.combine_whole_sequences(self.compressor.combine, self.compressor.rows(x), metadata)
        sees = groups_seen(closed, metadata, x.shape[0])
        if isinstance(self.indexer, CompressedIndexer):
            own = self.indexer.compressor
            _, keys = groups.combine_whole_sequences(own.combine, own.rows(x), metadata)
            queries = self.indexer.queries(x, latent, metadata.input_positions)
            num_selected = self.indexer.sizes.num_selected
            sees = select_from_whole_sequences(*queries, keys, sees, num_selected=num_selected)
        return entries, sees


class BlockAttention(CompressedAttention):
    """Attention of the last B tokens of a sequence to the W tokens before them and to all of themselves (DSpark).

    `sizes.window` is W + B. It needs a cache.
    """

    def keep(self, kv_cache: PagedCache, x: jax.Array, metadata: AttentionMetadata) -> PagedCache:
        """Returns the cache with the entries of x [T, E]."""
        entries = self._rotated(self.kv_proj(x), metadata.input_positions)
        return write_rows(entries, kv_cache, metadata.batch_for(self.span))

    def last_seen(self, metadata: AttentionMetadata) -> jax.Array:
        request, _ = metadata.batch.request_of_token()
        return metadata.seq_lens[request] - 1


def groups_seen(closed: ClosedGroups, metadata: AttentionMetadata, num_tokens: int) -> jax.Array:
    """Returns bool [T, C]: True where a token of whole sequences sees a closed group."""
    request, _ = metadata.batch.request_of_token()
    return (request[:, None] == closed.request) & (jnp.arange(num_tokens)[:, None] >= closed.row) & closed.valid


def rotate_last(rope: RotaryEmbedding, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns x [T, N, D], of which the last `rope.rotary_dim` dimensions are rotated."""
    kept, last = jnp.split(x, [x.shape[-1] - rope.rotary_dim], axis=-1)
    return jnp.concatenate([kept, rope(last, last[:, :1], positions)[0]], axis=-1)
