from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxis.errors import ConfigError
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.indexer import TokenIndexer
from jaxis.layers.mla import LatentAttentionSizes, LatentCacheSpec, MultiHeadLatentAttention
from jaxis.layers.scope import LayerScope


class SparseLatentAttention(MultiHeadLatentAttention):
    """Latent attention (DeepSeek Sparse Attention) to at most K tokens per token, selected by an indexer.

    If layers share selections (IndexShare, arXiv:2603.12201), a layer without an indexer uses the selection of the last
    layer before it that has one. Its cache is then a tuple whose last entry is that selection: the decoder hands it on
    from layer to layer.

    An engine that serves no context of more than K tokens attends to all of them, with dense attention's kernels, and
    caches no keys of indexers.

    Args:
      indexer: The layer's indexer; None if it uses another layer's selection.
      num_selected: K.
      hands_on_selection: True if layers share selections.
      options: Further arguments of `LatentAttention`.

    Raises:
      ConfigError: decode_context_parallel_size would divide the context of selected tokens.
    """

    def __init__(
        self,
        scope: LayerScope,
        sizes: LatentAttentionSizes,
        *,
        indexer: TokenIndexer | None,
        num_selected: int,
        hands_on_selection: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(scope, sizes, **options)
        self.num_selected = num_selected
        self.serves_short_contexts = scope.max_model_len <= self.num_selected
        self.hands_on_selection = hands_on_selection
        if self.context_devices > 1 and not self.serves_short_contexts:
            raise ConfigError(
                f"decode_context_parallel_size={self.context_devices} cannot divide the context of a model that "
                f"attends to {self.num_selected} selected tokens: use 1, or a max_model_len of at most that"
            )
        self.indexer = indexer

    @property
    def kv_cache_spec(self) -> LatentCacheSpec:
        """Specification of the cache of latents; the caches of an indexer follow it."""
        num_selected = None if self.serves_short_contexts else self.num_selected
        return dataclasses.replace(super().kv_cache_spec, num_selected=num_selected)

    def __call__(self, kv_cache: Any, x: jax.Array, metadata: AttentionMetadata) -> tuple[Any, jax.Array]:
        """Returns the updated caches and [T, E] for x [T, E].

        `kv_cache` is the cache of the latents, or a tuple of it, the indexer's caches if there are any, and the last
        selection if layers share them. Without caches, it has None in the place of each, or is None if none are shared.
        """
        caches = list(kv_cache) if isinstance(kv_cache, tuple) else [kv_cache]
        q, latents, rope_key, query_latent, *gate = self._project(x)
        if self.serves_short_contexts and caches[0] is not None:
            selection = None
        elif self.indexer is None:
            selection = caches[-1]
        else:
            own = slice(1, len(caches) - self.hands_on_selection)
            of_indexer = () if caches[0] is None else tuple(caches[own])
            of_indexer, selection = self.indexer(of_indexer, x, query_latent, metadata)
            if of_indexer:
                caches[own] = of_indexer
        if self.hands_on_selection:
            caches[-1] = selection
        caches[0], out = self._attend(caches[0], q, latents, rope_key, metadata, selection=selection, gate=gate)
        return tuple(caches) if isinstance(kv_cache, tuple) else caches[0], out
