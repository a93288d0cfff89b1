from __future__ import annotations

from typing import Any

import jax

from jaxis.layers.attention import attention
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.causal_conv import ResidualConv
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import linear
from jaxis.layers.row_order import RowOrder
from jaxis.layers.scope import LayerScope, never_quantized
from jaxis.layers.uncached import is_cache


class RelativeAttention(GroupedQueryAttention):
    """Attention whose scores have a bias by the key's distance, in place of positional encoding (Inkling).

    The bias of head h is `rel_logits_proj(r_proj(x)[h])[distance]`, and 0 from `extent` on. Keys and values pass a
    `ResidualConv` over `conv_width` tokens before their norms. `relative_size` is that of a head of `r_proj`. Other
    arguments are those of `GroupedQueryAttention`.
    """

    def __init__(self, scope: LayerScope, *, extent: int, relative_size: int, conv_width: int, **options: Any) -> None:
        super().__init__(scope, use_rope=False, **options)
        size: int = scope.config["hidden_size"]
        self.k_sconv, self.v_sconv = (
            ResidualConv(scope / name, self.num_kv_heads * self.head_dim, conv_width) for name in ("k_sconv", "v_sconv")
        )
        self.r_proj = linear(scope / "r_proj", size, self.num_heads * relative_size, axes=("heads", "embed"))
        of_profiles = never_quantized(scope / "rel_logits_proj")
        self.rel_logits_proj = linear(of_profiles, relative_size, extent, axes=(None, None))

    def row_orders(self, num_devices: int) -> list[RowOrder]:
        """Returns none: channels of convolutions are in the checkpoint's order; attention repeats heads for devices."""
        del num_devices
        return []

    def __call__(self, kv_cache: Any, x: jax.Array, metadata: AttentionMetadata) -> tuple[Any, jax.Array]:
        """Returns [T, E] and updated caches, for those of keys and values and the states of both convolutions."""
        cache, state_of_k, state_of_v = kv_cache
        q, k, v, *gate = self.project(x)
        state_of_k, k = self.k_sconv(state_of_k, k, metadata)
        state_of_v, v = self.v_sconv(state_of_v, v, metadata)
        q, k, v, gate = self.heads_of([q, k, v, *gate], metadata, is_paged=is_cache(cache))
        relative = self.r_proj(x).reshape(*q.shape[:2], -1)
        if self.query_scale is not None:
            relative = self.query_scale(relative, metadata.input_positions)
        cache, out = attention(
            *(cache, q, k, v, metadata),
            rope=None,
            scale=self.scale,
            span=self.span,
            bias=self.rel_logits_proj(relative.reshape(-1, relative.shape[-1])).reshape(*q.shape[:2], -1),
        )
        return (cache, state_of_k, state_of_v), self.output(out, gate)
