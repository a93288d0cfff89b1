"""Short convolutions over time: before recurrences, and as a layer of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxis.errors import ConfigError
from jaxis.kernels.causal_conv import causal_conv
from jaxis.kernels.native_constants import MAX_CONV_WIDTH
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.kv_cache_spec import StateArray, StateCacheSpec
from jaxis.layers.leaves import linear
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.scope import LayerScope

# A short convolution over the tokens of a sequence, each channel by itself.


class CausalConv(JaxModule):
    """`y[t] = activation(sum_j weight[:, 0, j] * x[t - W + 1 + j] + bias)`; x is zero before a sequence begins.

    Its state is the last W - 1 inputs.

    Args:
      scope: The layer's scope.
      num_channels: C.
      width: W.
      use_bias: Whether there is a `bias` [C].
      activation: "silu", or None for none.
      dtype: Data type of the weight and the bias; None means the model's.

    Raises:
      ConfigError: W is not 2 to MAX_CONV_WIDTH.
    """

    def __init__(
        self,
        scope: LayerScope,
        num_channels: int,
        width: int,
        *,
        use_bias: bool,
        activation: str | None,
        dtype: DTypeLike | None = None,
    ) -> None:
        if not 2 <= width <= MAX_CONV_WIDTH:
            raise ConfigError(f"a convolution over {width} tokens is not supported: 2 to {MAX_CONV_WIDTH} are")
        self.num_channels, self.width, self.activation = num_channels, width, activation
        init, dtype = nnx.initializers.lecun_normal(), scope.dtype if dtype is None else dtype
        self.weight = make_parameter(scope.rngs, init, (num_channels, 1, width), dtype, axes=("heads", None, None))
        self.bias = None
        if use_bias:
            self.bias = make_parameter(scope.rngs, nnx.initializers.zeros, (num_channels,), dtype, axes=("heads",))

    @property
    def state_array(self) -> StateArray:
        """The state that the engine allocates for the layer."""
        return StateArray((self.width - 1, self.num_channels), (None, "heads"))

    def __call__(
        self, state: jax.Array | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """state [num_slots, W - 1, C] or None, x [T, C] -> the updated state, and [T, C]."""
        return causal_conv(
            x,
            self.weight[...][:, 0],
            None if self.bias is None else self.bias[...],
            state,
            metadata.state_slots if state is not None else None,
            metadata.query_start_loc,
            metadata.request_distribution[2],
            activation=self.activation,
        )


# Short convolutions in place of attention, as LFM2 has them in most of its layers.


State = tuple[jax.Array] | None
"""The inputs of the convolution; None without a cache."""


class ShortConv(JaxModule):
    """`out_proj(c * conv(b * v))`, where b, c and v are thirds of `in_proj(x)`.

    Sizes are config.json's: `hidden_size` E, and `conv_L_cache`, the taps of the convolution.

    Args:
      scope: The layer's scope.
      default_width: The taps where config.json does not say.
      use_bias: Whether the projections and the convolution have biases.
    """

    def __init__(self, scope: LayerScope, *, default_width: int = 3, use_bias: bool) -> None:
        size: int = scope.config["hidden_size"]
        width: int = scope.config.get("conv_L_cache", default_width)
        self.in_proj = linear(scope / "in_proj", size, 3 * size, axes=("heads", "embed"), use_bias=use_bias)
        self.conv = CausalConv(scope / "conv", size, width, use_bias=use_bias, activation=None)
        self.out_proj = linear(scope / "out_proj", size, size, axes=("embed", "heads"), use_bias=use_bias)

    @property
    def state_cache_spec(self) -> StateCacheSpec:
        """The state that the engine allocates for this layer."""
        return StateCacheSpec((self.conv.state_array,))

    def __call__(self, kv_cache: State, x: jax.Array, metadata: AttentionMetadata) -> tuple[State, jax.Array]:
        """x [T, E] -> the updated state (None without one) and [T, E]."""
        b, c, v = jnp.split(self.in_proj(x), 3, axis=-1)
        inputs, mixed = self.conv(None if kv_cache is None else kv_cache[0], b * v, metadata)
        return None if inputs is None else (inputs,), self.out_proj(c * mixed)
