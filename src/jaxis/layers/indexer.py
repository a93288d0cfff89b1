from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.kernels.batch import sees_in_request
from jaxis.kernels.index_selection import (
    group_cache_layout,
    index_cache_layout,
    select_from_whole_sequences,
    select_tokens,
)
from jaxis.kernels.paged_cache import CacheLayout, PagedCache
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.leaves import float32_linear, linear
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule
from jaxis.layers.norm import JaxLayerNorm, Norm
from jaxis.layers.rope import RotaryEmbedding
from jaxis.layers.scope import LayerScope, never_quantized
from jaxis.layers.token_groups import RowCacheSpec
from jaxis.parallel.mesh import alike_on_each_device

# Epsilon of the norm of keys: the reference's own, not the config's.
_NORM_EPSILON = 1e-6

IndexCaches = tuple[PagedCache, ...]
"""The caches of an indexer, in the order of its modules that have one; empty without caches."""


class TokenIndexer(Protocol):
    """Module that selects the tokens of a context that each token attends to."""

    num_selected: int
    """K, the most tokens that a token attends to."""

    def __call__(
        self, caches: IndexCaches, x: jax.Array, query_input: jax.Array, metadata: AttentionMetadata
    ) -> tuple[IndexCaches, jax.Array]:
        """Returns the updated caches, and the selection, for x [T, E] and query_input [T, query_size].

        The selection is i32 [T, K], as in `select_tokens`. Without caches, sequences are whole, and it is bool [T, T]:
        True where a token of the batch attends to another. An indexer of grouped queries may select for each of K
        key-value heads: i32 [T, heads, K], or bool [T, heads, T].
        """
        ...


@dataclass(frozen=True)
class IndexCacheSpec:
    """Cache of one key per token, or per group of tokens, in the blocks of the layer's other cache, on every device.

    Attributes:
      head_dim: Elements of a key.
      num_heads: Query heads that it is multiplied with.
      group_size: Tokens of a group; 1: each token has a key.
      in_plain_jax: True if plain JAX reads or writes single keys.
    """

    span: ClassVar[AttentionSpan] = FULL_CONTEXT

    head_dim: int
    num_heads: int
    group_size: int = 1
    in_plain_jax: bool = False

    def layout(self, block_size: int, dtype: DTypeLike) -> CacheLayout:
        if self.group_size > 1 or self.in_plain_jax:
            return group_cache_layout(block_size, self.group_size, self.head_dim, dtype)
        return index_cache_layout(block_size, self.head_dim, dtype)

    def on_devices(self, tensor_parallel_size: int) -> IndexCacheSpec:
        del tensor_parallel_size
        return self


@dataclass(frozen=True)
class IndexerSizes:
    """Dimensions of an indexer.

    Attributes:
      num_heads: H, heads of queries; all share one key per token.
      head_dim: D, elements of a query or key.
      num_selected: K, the largest number of tokens that a token attends to.
      always: Numbers of first and of last tokens that a token always attends to.
    """

    num_heads: int
    head_dim: int
    num_selected: int
    always: tuple[int, int] = (0, 0)


class IndexKeyCache(JaxModule):
    """Cache of an indexer: a module of its own, since an indexer that no context is long enough for has none."""

    def __init__(self, kv_cache_spec: IndexCacheSpec | RowCacheSpec) -> None:
        self.kv_cache_spec = kv_cache_spec


def key_norm(scope: LayerScope, head_dim: int, *, epsilon: float = _NORM_EPSILON) -> JaxLayerNorm:
    """Creates the norm of an indexer's keys."""
    return JaxLayerNorm(head_dim, scope.rngs, epsilon=epsilon, dtype=scope.dtype)


def head_weights(scope: LayerScope, num_heads: int) -> JaxLinear:
    """Creates the projection to the weights of an indexer's heads: float32 and never quantized, like a router."""
    return float32_linear(never_quantized(scope), scope.config["hidden_size"], num_heads)


class Indexer(JaxModule):
    """Scores the tokens of a context and selects the best (section 2.1 of the DeepSeek V3.2 report, arXiv:2512.02556).

    The score of token s for token t is the sum over heads of `w[t, h] * relu(q[t, h] . k[s])`. The published model also
    multiplies queries and keys by a Hadamard matrix, which does not change products, and rounds to fp8, which neither
    this module nor transformers does. All devices of a mesh compute the same selection. There is no cache where no
    context is longer than what is selected.

    Args:
      query_size: Elements of attention's normed query latent, from which the indexer's queries are projected.
      rope: Rotates the first `rope.rotary_dim` elements of queries and keys; None for no positions.
      rotates_last: True if it rotates the last ones instead.
      make_key_norm: Factory of the norm of keys.
    """

    def __init__(
        self,
        scope: LayerScope,
        sizes: IndexerSizes,
        *,
        query_size: int,
        rope: RotaryEmbedding | None,
        rotates_last: bool = False,
        make_key_norm: Callable[[LayerScope, int], Norm] = key_norm,
    ) -> None:
        self.sizes, self.rope, self.num_selected = sizes, rope, sizes.num_selected
        self.rotates_last = rotates_last
        has_cache = scope.max_model_len > sizes.num_selected
        self.key_cache = IndexKeyCache(IndexCacheSpec(sizes.head_dim, sizes.num_heads)) if has_cache else None
        hidden_size: int = scope.config["hidden_size"]
        self.wq_b = linear(scope / "wq_b", query_size, sizes.num_heads * sizes.head_dim, axes=(None, None))
        self.wk = linear(scope / "wk", hidden_size, sizes.head_dim, axes=(None, "embed"))
        self.k_norm = make_key_norm(scope, sizes.head_dim)
        self.weights_proj = head_weights(scope / "weights_proj", sizes.num_heads)

    def queries(self, query_input: jax.Array, metadata: AttentionMetadata) -> jax.Array:  # noqa: ARG002
        """Returns queries [T, H, D] before the rope."""
        return self.wq_b(query_input).reshape(-1, self.sizes.num_heads, self.sizes.head_dim)

    def __call__(
        self,
        caches: IndexCaches,
        x: jax.Array,
        query_input: jax.Array,
        metadata: AttentionMetadata,
        rope: RotaryEmbedding | None = None,
    ) -> tuple[IndexCaches, jax.Array]:
        """Computes `TokenIndexer`; `rope` is that of the step where it has learned parts, instead of the indexer's."""
        sizes, rope = self.sizes, rope or self.rope
        chosen: dict[str, Any] = {"num_selected": sizes.num_selected, "always": sizes.always}
        q = self.queries(query_input, metadata)
        keys = self.k_norm(self.wk(x))[:, None]
        if self.rotates_last and rope is not None:  # Products do not depend on the order of the elements.
            q, keys = (jnp.roll(each, rope.rotary_dim, axis=-1) for each in (q, keys))
        weights = self.weights_proj(x.astype(jnp.float32)) * (sizes.num_heads * sizes.head_dim) ** -0.5
        if not caches:
            request, valid = metadata.batch.request_of_token()
            if rope is not None:
                q, keys = rope(q, keys, metadata.input_positions, metadata.seq_lens[request])
            visible = sees_in_request(request, valid)
            return (), select_from_whole_sequences(q, weights, keys[:, 0], visible, **chosen)
        if rope is not None:
            q, keys = rope(q, keys, metadata.input_positions)
        select = alike_on_each_device(functools.partial(select_tokens, **chosen))
        key_cache, selection = select(q, weights, keys[:, 0], caches[0], metadata.batch_for(FULL_CONTEXT))
        return (key_cache,), selection
