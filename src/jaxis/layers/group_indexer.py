"""Indexers that score groups of consecutive tokens, one key for each group, and select the best groups whole."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.config.attention_span import FULL_CONTEXT
from jaxis.kernels.index_selection import num_selected_tokens, select_groups, select_groups_of_whole_sequences
from jaxis.kernels.token_groups import ordered_softmax_sum, ordered_sum
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.indexer import IndexCaches, IndexCacheSpec, IndexKeyCache, head_weights, key_norm
from jaxis.layers.leaves import layer_norm, linear, rms_norm
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.rope import RotaryEmbedding
from jaxis.layers.scope import LayerScope, never_quantized
from jaxis.layers.token_groups import RowCacheSpec, TokenGroups
from jaxis.parallel.mesh import alike_on_each_device

# Values of a position's digits: bfloat16 has all integers up to 256.
_DIGITS = (256 * 256, 256, 1)


@dataclass(frozen=True)
class GroupIndexerSizes:
    """Dimensions of an indexer of groups.

    Attributes:
      num_heads: H, heads of queries; all share one key per group.
      head_dim: D, elements of a query or key.
      group_size: G, tokens of a group.
      num_groups: The most closed groups that a token attends to.
      delay: Tokens after its last one until a group is seen: 1 if a token's own group is never among them.
      num_selections: Selections of a token, each by as many consecutive heads; one, or one of each kv head.
    """

    num_heads: int
    head_dim: int
    group_size: int
    num_groups: int
    delay: int = 0
    num_selections: int = 1

    @property
    def num_selected(self) -> int:
        """K, the most tokens that a token attends to."""
        return num_selected_tokens(self.num_groups, self.group_size, self.delay)


class GroupIndexer(JaxModule):
    """Selects the tokens of the groups that score best, and those of the open group.

    The score of group g for token t is the sum over heads of `w[t, h] * relu(q[t, h] . k[g])`. A token that sees few
    enough groups attends to everything. The keys of groups and the rows of their tokens have caches, in this order of
    `caches`: of keys, of rows. There are none where no context is longer than what is selected.

    Args:
      row_size: Elements of a token's row, of which `combine` makes keys.
    """

    def __init__(self, scope: LayerScope, sizes: GroupIndexerSizes, *, row_size: int) -> None:
        self.sizes, self.num_selected = sizes, sizes.num_selected
        self.groups = TokenGroups(sizes.group_size, sizes.group_size)
        has_cache = scope.max_model_len > sizes.num_selected
        key_spec = IndexCacheSpec(sizes.head_dim, sizes.num_heads, sizes.group_size)
        # Their names are in the order of the caches: flax sorts the modules of a model that it puts together.
        self.key_cache = IndexKeyCache(key_spec) if has_cache else None
        self.row_cache = IndexKeyCache(RowCacheSpec(row_size, self.groups.span)) if has_cache else None

    def combine(self, rows: jax.Array, exists: jax.Array, first_position: jax.Array) -> jax.Array:
        """Returns the keys [N, D] of groups; see `Combine` of `kernels.token_groups`."""
        raise NotImplementedError

    def __call__(
        self, caches: IndexCaches, x: jax.Array, query_input: jax.Array, metadata: AttentionMetadata
    ) -> tuple[IndexCaches, jax.Array]:
        """Returns the updated caches and the selection, as a `TokenIndexer` does."""
        raise NotImplementedError

    def select(
        self, caches: IndexCaches, q: jax.Array, weights: jax.Array, rows: jax.Array, metadata: AttentionMetadata
    ) -> tuple[IndexCaches, jax.Array]:
        """Returns the updated caches and the selection, as `TokenIndexer` does; with S selections [T, S, ...].

        Takes q [T, H, D], weights float32 [T, H], and the rows [T, row_size] of the step's tokens.
        """
        sizes = {name: getattr(self.sizes, name) for name in ("num_groups", "group_size", "delay")}
        parts = [jnp.split(each, self.sizes.num_selections, axis=1) for each in (q, weights)]
        if not caches:
            closed, keys = self.groups.combine_whole_sequences(self.combine, rows, metadata)
            select_whole = functools.partial(select_groups_of_whole_sequences, **sizes)
            of_heads = zip(*parts, strict=True)
            return (), _stacked([select_whole(*heads, keys, closed, metadata.batch) for heads in of_heads])
        key_cache, row_cache = caches
        row_cache, key_cache = self.groups.update(self.combine, rows, row_cache, key_cache, metadata)
        select = alike_on_each_device(functools.partial(select_groups, **sizes))
        rest = (key_cache, metadata.batch_for(FULL_CONTEXT))
        return (key_cache, row_cache), _stacked([select(*heads, *rest) for heads in zip(*parts, strict=True)])


def _stacked(selections: list[jax.Array]) -> jax.Array:
    return selections[0] if len(selections) == 1 else jnp.stack(selections, axis=1)


class GatedGroupIndexer(GroupIndexer):
    """Keys of groups are sums of their tokens' keys, weighted for each dimension by a softmax over the group (GLM-5.3).

    The logits are `compress_gate(x)`, whose weight is `index_kpool_compress_gate` in checkpoints, and a learned part of
    each place in the group. There is no rope.

    Args:
      query_size: Elements of attention's normed query latent, from which queries are projected.
    """

    def __init__(self, scope: LayerScope, sizes: GroupIndexerSizes, *, query_size: int) -> None:
        super().__init__(scope, sizes, row_size=2 * sizes.head_dim)
        hidden_size: int = scope.config["hidden_size"]
        head_dim = sizes.head_dim
        self.wq_b = linear(scope / "wq_b", query_size, sizes.num_heads * head_dim, axes=(None, None))
        self.wk = linear(scope / "wk", hidden_size, head_dim, axes=(None, "embed"))
        self.k_norm = key_norm(scope, head_dim)
        self.weights_proj = head_weights(scope / "weights_proj", sizes.num_heads)
        self.compress_gate = linear(
            never_quantized(scope / "compress_gate"), hidden_size, head_dim, axes=(None, "embed")
        )
        shape = (sizes.group_size, head_dim)
        self.index_kpool_compress_ape = make_parameter(
            scope.rngs, nnx.initializers.zeros, shape, scope.dtype, axes=(None, None)
        )

    def combine(self, rows: jax.Array, exists: jax.Array, first_position: jax.Array) -> jax.Array:
        del exists, first_position
        keys, gates = jnp.split(rows, 2, axis=-1)
        return ordered_softmax_sum(gates + self.index_kpool_compress_ape[...].astype(jnp.float32), keys)

    def __call__(
        self, caches: IndexCaches, x: jax.Array, query_input: jax.Array, metadata: AttentionMetadata
    ) -> tuple[IndexCaches, jax.Array]:
        sizes = self.sizes
        q = self.wq_b(query_input).reshape(x.shape[0], sizes.num_heads, sizes.head_dim)
        weights = self.weights_proj(x.astype(jnp.float32)) * (sizes.num_heads * sizes.head_dim) ** -0.5
        rows = jnp.concatenate([self.k_norm(self.wk(x)), self.compress_gate(x)], axis=-1)
        return self.select(caches, q, weights, rows, metadata)


class MeanGroupIndexer(GroupIndexer):
    """Keys of groups are means of their tokens' keys, then normed, then rotated by the group's first position (Qwen4).

    Queries and keys come of one projection of x. All heads weigh the same. With M-RoPE, tokens' rows also have their
    time, row and column, since a group's first token may be of an earlier step.

    Args:
      rope: Rotates the first `rope.rotary_dim` elements of queries and keys.
    """

    def __init__(self, scope: LayerScope, sizes: GroupIndexerSizes, *, rope: RotaryEmbedding) -> None:
        super().__init__(scope, sizes, row_size=sizes.head_dim + (3 * len(_DIGITS) if rope.axes else 0))
        self.rope = rope
        size_out = (sizes.num_heads + 1) * sizes.head_dim
        self.index_qk_proj = linear(
            scope / "index_qk_proj", scope.config["hidden_size"], size_out, axes=(None, "embed")
        )
        self.q_layernorm = rms_norm(scope / "q_layernorm", sizes.head_dim, add_unit_offset=True)
        self.k_layernorm = rms_norm(scope / "k_layernorm", sizes.head_dim, add_unit_offset=True)

    def combine(self, rows: jax.Array, exists: jax.Array, first_position: jax.Array) -> jax.Array:
        del exists
        rows, digits = jnp.split(rows, [self.sizes.head_dim], axis=-1)
        if self.rope.axes:
            digits = digits[:, 0].astype(jnp.int32).reshape(-1, 3, len(_DIGITS))
            first_position = jnp.sum(digits * jnp.asarray(_DIGITS), axis=-1).T
        mean = ordered_sum(rows) / rows.shape[1]
        keys = self.k_layernorm(mean.astype(self.k_layernorm.dtype))[:, None]
        return self.rope(keys, keys, first_position)[1][:, 0].astype(jnp.float32)

    def __call__(
        self, caches: IndexCaches, x: jax.Array, query_input: jax.Array, metadata: AttentionMetadata
    ) -> tuple[IndexCaches, jax.Array]:
        del query_input
        sizes = self.sizes
        q, rows = jnp.split(self.index_qk_proj(x), [sizes.num_heads * sizes.head_dim], axis=-1)
        q = self.q_layernorm(q.reshape(x.shape[0], sizes.num_heads, sizes.head_dim))
        positions = metadata.positions_for_rope
        q, _ = self.rope(q, q[:, :1], positions)
        if self.rope.axes:
            digits = jnp.broadcast_to(positions, (3, x.shape[0])).T[..., None] // jnp.asarray(_DIGITS) % _DIGITS[-2]
            rows = jnp.concatenate([rows, digits.reshape(x.shape[0], -1).astype(rows.dtype)], axis=-1)
        weights = jnp.full(q.shape[:2], sizes.head_dim**-0.5, jnp.float32)
        return self.select(caches, q, weights, rows, metadata)


class RotatedGroupIndexer(GroupIndexer):
    """Keys of groups are sums of their tokens' normed and rotated keys, weighted by a softmax of `z_proj(x)` (Step 5).

    The softmax is over the group, for each dimension.

    Args:
      rope: Rotates the first `rope.rotary_dim` elements of queries and keys.
    """

    def __init__(self, scope: LayerScope, sizes: GroupIndexerSizes, *, rope: RotaryEmbedding) -> None:
        super().__init__(scope, sizes, row_size=2 * sizes.head_dim)
        self.rope = rope
        hidden_size: int = scope.config["hidden_size"]
        size_out = sizes.num_heads * sizes.head_dim
        self.q_proj = linear(scope / "q_proj", hidden_size, size_out, axes=(None, "embed"))
        self.k_proj = linear(scope / "k_proj", hidden_size, sizes.head_dim, axes=(None, "embed"))
        self.z_proj = linear(scope / "z_proj", hidden_size, sizes.head_dim, axes=(None, "embed"))
        self.weights_proj = head_weights(scope / "weights_proj", sizes.num_heads)
        self.q_norm = rms_norm(scope / "q_norm", sizes.head_dim, add_unit_offset=True)
        self.k_norm = layer_norm(scope / "k_norm", sizes.head_dim, epsilon=scope.config["rms_norm_eps"])

    def combine(self, rows: jax.Array, exists: jax.Array, first_position: jax.Array) -> jax.Array:
        del exists, first_position
        keys, logits = jnp.split(rows, 2, axis=-1)
        return ordered_softmax_sum(logits, keys)

    def __call__(
        self, caches: IndexCaches, x: jax.Array, query_input: jax.Array, metadata: AttentionMetadata
    ) -> tuple[IndexCaches, jax.Array]:
        del query_input
        sizes = self.sizes
        q = self.q_norm(self.q_proj(x).reshape(x.shape[0], sizes.num_heads, sizes.head_dim))
        q, keys = self.rope(q, self.k_norm(self.k_proj(x))[:, None], metadata.input_positions)
        rows = jnp.concatenate([keys[:, 0], self.z_proj(x)], axis=-1)
        return self.select(caches, q, self.weights_proj(x.astype(jnp.float32)), rows, metadata)
