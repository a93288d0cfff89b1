from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax

from jaxis.layers.attention import attention
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.causal_conv import DynamicConv, ResidualConv
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import linear
from jaxis.layers.linear import JaxLinear
from jaxis.layers.norm import L2Clip, UnweightedRmsNorm
from jaxis.layers.output_gate import OutputGate
from jaxis.layers.row_order import RowOrder
from jaxis.layers.scope import LayerScope, never_quantized
from jaxis.layers.uncached import is_cache


class RelativeAttention(GroupedQueryAttention):
    """Attention whose scores have a bias by the key's distance, in place of positional encoding (Inkling).

    The bias of head h is `rel_logits_proj(r_proj(x)[h])[distance]`, and 0 from `extent` on. Keys and values pass
    convolutions before their norms.

    Args:
      relative_size: Size of a head of `r_proj`.
      make_conv: (scope, number of channels) -> such a convolution.
      options: Other arguments of `GroupedQueryAttention`.
    """

    gate_names: ClassVar[tuple[str, ...]] = ()
    r_norm: L2Clip | None = None
    attn_sink_proj: JaxLinear | None = None

    def __init__(
        self,
        scope: LayerScope,
        *,
        extent: int,
        relative_size: int,
        make_conv: Callable[[LayerScope, int], ResidualConv | DynamicConv],
        **options: Any,
    ) -> None:
        super().__init__(scope, use_rope=False, **options)
        size, num_channels = scope.config["hidden_size"], self.num_kv_heads * self.head_dim
        self.k_sconv, self.v_sconv = (make_conv(scope / name, num_channels) for name in ("k_sconv", "v_sconv"))
        self.r_proj = linear(scope / "r_proj", size, self.num_heads * relative_size, axes=("heads", "embed"))
        of_profiles = never_quantized(scope / "rel_logits_proj")
        self.rel_logits_proj = linear(of_profiles, relative_size, extent, axes=(None, None))

    def row_orders(self, num_devices: int) -> list[RowOrder]:
        """Returns none: channels of convolutions are in the checkpoint's order; attention repeats heads for devices."""
        del num_devices
        return []

    def __call__(
        self, kv_cache: Any, x: jax.Array, metadata: AttentionMetadata, *of_keys_and_values: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Returns [T, E] and updated caches, for those of keys and values and the states of both convolutions.

        x [T, E] is also the input of keys and of values, unless they have their own.
        """
        cache, state_of_k, state_of_v = kv_cache
        of_k, of_v = of_keys_and_values or (x, x)
        names = ("q_proj", *self.kv_projections, *self.gate_names)
        q, k, v, *gate = (getattr(self, name)(y) for name, y in zip(names, (x, of_k, of_v, x), strict=False))
        state_of_k, k = self.k_sconv(state_of_k, k, metadata, of_k)
        state_of_v, v = self.v_sconv(state_of_v, v, metadata, of_v)
        q, k, v, gate = self.heads_of([q, k, v, *gate], metadata, is_paged=is_cache(cache))
        relative = self.r_proj(x).reshape(*q.shape[:2], -1)
        if self.r_norm is not None:
            relative = self.r_norm(relative)
        if self.query_scale is not None:
            relative = self.query_scale(relative, metadata.input_positions)
        cache, out = attention(
            *(cache, q, k, v, metadata),
            rope=None,
            scale=self.scale,
            span=self.span,
            sinks=None if self.attn_sink_proj is None else self.attn_sink_proj(x),
            bias=self.rel_logits_proj(relative.reshape(-1, relative.shape[-1])).reshape(*q.shape[:2], -1),
        )
        return (cache, state_of_k, state_of_v), self.output(out, gate)


class ClippedRelativeAttention(RelativeAttention):
    """`RelativeAttention` with bounds of the lengths of heads, a sink of each token and a gate (Inkling 2).

    `bound` is that of queries and keys, `relative_bound` that of the heads of `r_proj`. Values have a norm.
    """

    gate_names = ("gate_attn",)

    def __init__(
        self, scope: LayerScope, *, bound: float, relative_bound: float, relative_size: int, **options: Any
    ) -> None:
        gate = OutputGate(self.gate_names[0])
        super().__init__(scope, relative_size=relative_size, output_gate=gate, **options)
        rngs, dtype, heads = scope.rngs, scope.dtype, self.num_heads
        self.q_norm = L2Clip((heads, self.head_dim), rngs, bound=bound, dtype=dtype)
        self.k_norm = L2Clip((self.num_kv_heads, self.head_dim), rngs, bound=bound, use_scale=False, dtype=dtype)
        self.r_norm = L2Clip((heads, relative_size), rngs, bound=relative_bound, dtype=dtype)
        self.v_norm = UnweightedRmsNorm(epsilon=scope.config["rms_norm_eps"])
        of_sinks = never_quantized(scope / "attn_sink_proj")
        self.attn_sink_proj = linear(of_sinks, scope.config["hidden_size"], heads, axes=("heads", "embed"))

    def values(self, v: jax.Array) -> jax.Array:
        return self.v_norm(v)
