from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxis.config.attention_span import FULL_CONTEXT
from jaxis.kernels.paged_cache import CacheLayout
from jaxis.kernels.selected_attention import selected_attention, selected_cache_layout
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.indexer import TokenIndexer
from jaxis.layers.kv_cache_spec import KVCacheSpec
from jaxis.layers.rope import RotaryEmbedding
from jaxis.layers.scope import LayerScope
from jaxis.parallel.mesh import devices_of_layer, on_each_device


@dataclass(frozen=True)
class SelectedKVCacheSpec(KVCacheSpec):
    """Keys and values of which a token reads selected ones, one by one.

    Attributes:
      num_selected: Most tokens that a token attends to.
    """

    num_selected: int | None = None

    def layout(self, block_size: int, dtype: DTypeLike) -> CacheLayout:
        return selected_cache_layout(block_size, self.num_kv_heads, self.head_dim, dtype)


class SelectedAttention(GroupedQueryAttention):
    """Attention of grouped queries to at most N tokens per token, which an indexer selects, once or for each kv head.

    An engine that serves no context of more than N tokens attends to all of them, with the kernels and the cache of
    grouped-query attention, and the indexer caches nothing.

    Args:
      make_indexer: Function that creates the indexer from its scope and the rope of attention.
      options: Arguments of `GroupedQueryAttention`, without spans, biases by distance, caps and sinks of scores.
    """

    hands_on_selection = False

    def __init__(
        self,
        scope: LayerScope,
        *,
        make_indexer: Callable[[LayerScope, RotaryEmbedding], TokenIndexer],
        **options: Any,
    ) -> None:
        super().__init__(scope, **options)
        assert self.rope is not None
        self.indexer = make_indexer(scope / "indexer", self.rope)
        self.num_selected = self.indexer.num_selected
        self.serves_short_contexts = scope.max_model_len <= self.num_selected

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """Specification of the cache of keys and values; the caches of the indexer follow it."""
        spec = super().kv_cache_spec
        if self.serves_short_contexts:
            return spec
        fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        return SelectedKVCacheSpec(**fields, num_selected=self.num_selected)

    def __call__(self, kv_cache: Any, x: jax.Array, metadata: AttentionMetadata) -> tuple[Any, jax.Array]:
        """Returns the updated caches and [T, E] for x [T, E]: of keys and values, and the indexer's if it has any."""
        of_keys, *of_indexer = kv_cache if isinstance(kv_cache, tuple) else (kv_cache,)
        if self.serves_short_contexts and of_keys is not None:
            return super().__call__(of_keys, x, metadata)
        q, k, v, gate = self.heads(x, metadata, is_paged=of_keys is not None)
        if of_keys is None:
            _, visible = self.indexer((), x, x, metadata)
            return kv_cache, self.output(self._whole_sequences(q, k, v, visible, metadata), gate)
        of_indexer, selection = self.indexer(tuple(of_indexer), x, x, metadata)
        operands = (metadata.batch_for(FULL_CONTEXT), selection)
        kernel = functools.partial(selected_attention, scale=self.scale)
        if devices_of_layer() > 1:
            copies = of_keys.layout.num_heads // k.shape[1]
            k, v = jnp.repeat(k, copies, axis=1), jnp.repeat(v, copies, axis=1)
            whole, heads = PartitionSpec(), PartitionSpec(None, "model", None)
            in_cache = PartitionSpec(None, "model", *(None,) * (of_keys.array.ndim - 2))
            own = (whole, heads if selection.ndim == 3 else whole)
            kernel = on_each_device(kernel, (heads, heads, heads, in_cache, *own), (in_cache, heads))
        of_keys, out = kernel(q, k, v, of_keys, *operands)
        return (of_keys, *of_indexer), self.output(out, gate)

    def _whole_sequences(
        self, q: jax.Array, k: jax.Array, v: jax.Array, selection: jax.Array, metadata: AttentionMetadata
    ) -> jax.Array:
        """Returns attention [T, H, D] to the tokens that bool [T, T], or [T, K, T], selects."""
        num_tokens, num_kv_heads = k.shape[:2]
        valid = jnp.arange(num_tokens) < metadata.num_tokens
        # Padding tokens see themselves, to keep their rows finite.
        visible = (
            jnp.reshape(selection, (num_tokens, -1, num_tokens)) | (jnp.eye(num_tokens, dtype=bool) & ~valid)[:, None]
        )
        grouped = q.reshape(num_tokens, num_kv_heads, -1, q.shape[-1])
        scores = jnp.einsum("tkgd,skd->tkgs", grouped, k, preferred_element_type=jnp.float32) * self.scale
        weights = jax.nn.softmax(jnp.where(visible[:, :, None], scores, -jnp.inf), axis=-1)
        out = jnp.einsum("tkgs,skd->tkgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return out.reshape(q.shape).astype(q.dtype)
