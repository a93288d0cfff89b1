from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.causal_conv import CausalConv
from jaxis.layers.leaves import linear
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.layers.state_cache_spec import StateCacheSpec

State = tuple[jax.Array] | None
"""Inputs of the convolution; None without a cache."""


class ShortConv(JaxModule):
    """`out_proj(c * conv(b * v))`, where b, c and v are thirds of `in_proj(x)`: in place of attention, as in LFM2.

    The convolution has config.json's `conv_L_cache` taps, or `default_width`. With `use_bias`, it and the projections
    have biases.
    """

    def __init__(self, scope: LayerScope, *, default_width: int = 3, use_bias: bool) -> None:
        size: int = scope.config["hidden_size"]
        width: int = scope.config.get("conv_L_cache", default_width)
        self.in_proj = linear(scope / "in_proj", size, 3 * size, axes=("heads", "embed"), use_bias=use_bias)
        self.conv = CausalConv(scope / "conv", size, width, use_bias=use_bias, activation=None)
        self.out_proj = linear(scope / "out_proj", size, size, axes=("embed", "heads"), use_bias=use_bias)

    @property
    def state_cache_spec(self) -> StateCacheSpec:
        return StateCacheSpec((self.conv.state_array,))

    def __call__(self, kv_cache: State, x: jax.Array, metadata: AttentionMetadata) -> tuple[State, jax.Array]:
        b, c, v = jnp.split(self.in_proj(x), 3, axis=-1)
        inputs, mixed = self.conv(None if kv_cache is None else kv_cache[0], b * v, metadata)
        return None if inputs is None else (inputs,), self.out_proj(c * mixed)
