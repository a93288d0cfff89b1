from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxis.errors import ConfigError
from jaxis.kernels.causal_conv import ConvOperands, causal_conv
from jaxis.kernels.materialize import materialize
from jaxis.kernels.native_constants import MAX_CONV_WIDTH
from jaxis.kernels.token_window import earlier_rows, kept_rows
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.leaves import linear
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope, never_quantized
from jaxis.layers.state_cache_spec import StateArray, StateCacheSpec


class CausalConv(JaxModule):
    """`y[t] = activation(sum_j weight[:, 0, j] * x[t - (W - 1 - j) D] + bias)`; x is zero before a sequence begins.

    The state is the last (W - 1) D inputs.

    Args:
      num_channels: C.
      width: W.
      use_bias: True for a `bias` [C].
      activation: "silu", or None for none.
      dtype: Type of the weight and the bias; None means the model's.
      dilation: D.

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
        dilation: int = 1,
    ) -> None:
        if not 2 <= width <= MAX_CONV_WIDTH:
            raise ConfigError(f"a convolution over {width} tokens is not supported: 2 to {MAX_CONV_WIDTH} are")
        self.num_channels, self.width, self.activation, self.dilation = num_channels, width, activation, dilation
        init, dtype = nnx.initializers.lecun_normal(), scope.dtype if dtype is None else dtype
        self.weight = make_parameter(scope.rngs, init, (num_channels, 1, width), dtype, axes=("heads", None, None))
        self.bias = None
        if use_bias:
            self.bias = make_parameter(scope.rngs, nnx.initializers.zeros, (num_channels,), dtype, axes=("heads",))

    @property
    def state_array(self) -> StateArray:
        return StateArray(((self.width - 1) * self.dilation, self.num_channels), (None, "heads"))

    def __call__(
        self, state: jax.Array | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """Returns the updated state and [T, C], for a state [num_slots, (W - 1) D, C] or None, and x [T, C]."""
        bias = None if self.bias is None else self.bias[...]
        operands = ConvOperands(x, self.weight[...][:, 0], bias, metadata.states(state))
        return causal_conv(operands, activation=self.activation, dilation=self.dilation)


class ResidualConv(CausalConv):
    """`(x + conv(x)) * factor` with a state of its own, for a `CausalConv` without bias and activation (Inkling)."""

    def __init__(self, scope: LayerScope, num_channels: int, width: int, *, factor: float = 1.0) -> None:
        super().__init__(scope, num_channels, width, use_bias=False, activation=None, dtype=jnp.float32)
        self.factor = factor

    @property
    def state_cache_spec(self) -> StateCacheSpec:
        return StateCacheSpec((self.state_array,))

    def __call__(
        self, state: Any, x: jax.Array, metadata: AttentionMetadata, _tap_input: jax.Array | None = None
    ) -> tuple[Any, jax.Array]:
        """Returns the updated state (None without one) and [T, C] for x [T, C]."""
        inputs, mixed = super().__call__(None if state is None else state[0], x, metadata)
        return None if inputs is None else (inputs,), materialize(scaled(x + materialize(mixed), self.factor))


class DynamicConv(JaxModule):
    """`(x[t] + sum_j (static_w[j] + taps(y[t])[h, j]) * x[t - j]) * factor` of channels of head h (Inkling 2).

    There are C channels of `num_heads` heads, and `width` taps; y has config.json's `hidden_size` features.
    """

    def __init__(self, scope: LayerScope, num_channels: int, width: int, *, num_heads: int, factor: float) -> None:
        self.num_channels, self.width, self.factor = num_channels, width, factor
        zeros, shape = nnx.initializers.zeros, (width, num_channels)
        self.static_w = make_parameter(scope.rngs, zeros, shape, scope.dtype, axes=(None, "heads"))
        of_taps = never_quantized(scope / "taps")
        self.taps = linear(of_taps, scope.config["hidden_size"], num_heads * width, axes=("heads", "embed"))

    @property
    def state_cache_spec(self) -> StateCacheSpec:
        return StateCacheSpec((StateArray((self.width - 1, self.num_channels), (None, "heads")),))

    def __call__(
        self, state: Any, x: jax.Array, metadata: AttentionMetadata, tap_input: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Returns the updated state (None without one) and [T, C] for x [T, C] and y [T, E]."""
        array, slots, starts, num_requests = metadata.states(None if state is None else state[0])
        taps = self.taps(tap_input).astype(jnp.float32).reshape(len(x), -1, 1, self.width)
        static = self.static_w[...].astype(jnp.float32).reshape(self.width, taps.shape[1], -1)
        y = x.astype(jnp.float32)
        for j, row in enumerate(earlier_rows(x, array, slots, starts, num_requests, range(self.width))):
            y = y + materialize((static[j] + taps[..., j]).reshape(x.shape) * row.astype(jnp.float32))
        kept = None if array is None or slots is None else (kept_rows(x, array, slots, starts, num_requests),)
        return kept, scaled(y, self.factor).astype(x.dtype)
