"""Mamba: a short convolution and a selective state space with a decay for each channel and element of its state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.config.hf_config import HFConfig
from jaxis.kernels.gates import gated, softplus
from jaxis.kernels.materialize import in_whole_vectors
from jaxis.kernels.selective_scan import ScanOperands, selective_scan
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.causal_conv import CausalConv
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.norm import Norm
from jaxis.layers.scope import LayerScope, never_quantized
from jaxis.layers.state_cache_spec import StateArray, StateCacheSpec

State = tuple[jax.Array, jax.Array] | None
"""Inputs of the convolution and the recurrent state; None without a cache."""


@dataclass(frozen=True, kw_only=True)
class Mamba1Sizes:
    """Sizes of a Mamba layer, which families name differently in config.json.

    Attributes:
      num_channels: I.
      state_size: N, the elements of each channel's state.
      time_step_rank: Features from which the channels' time steps are projected.
      conv_width: Taps of the convolution.
    """

    num_channels: int
    state_size: int
    time_step_rank: int
    conv_width: int


def time_step_rank(config: HFConfig, key: str) -> int:
    """Returns the value of this key of config.json; "auto", and a missing key, mean a sixteenth of `hidden_size`.

    Raises ConfigError if it is neither "auto" nor a number of features.
    """
    rank = config.get(key, "auto")
    if rank == "auto":
        return math.ceil(config["hidden_size"] / 16)
    if type(rank) is not int or rank < 1:
        raise config.fault(key, why="expected 'auto' or an integer of at least 1")
    return rank


class Mamba1(JaxModule):
    """Projections, convolution, recurrence and gate (arXiv:2312.00752).

    Args:
      conv_bias: True if the convolution has a bias.
      use_bias: True if the projections in and out have biases.
      norm_epsilon: Epsilon of RMS norms of time steps, B and C (Jamba); None for no norms.
      norm_weights: True if these norms have weights.
    """

    def __init__(
        self,
        scope: LayerScope,
        sizes: Mamba1Sizes,
        *,
        conv_bias: bool,
        use_bias: bool,
        norm_epsilon: float | None = None,
        norm_weights: bool = True,
    ) -> None:
        self.sizes = sizes
        size: int = scope.config["hidden_size"]
        channels, rank, state_size = sizes.num_channels, sizes.time_step_rank, sizes.state_size
        in_axes, out_axes = ("heads", "embed"), ("embed", "heads")
        self.in_proj = linear(scope / "in_proj", size, 2 * channels, axes=in_axes, use_bias=use_bias)
        self.conv1d = CausalConv(scope / "conv1d", channels, sizes.conv_width, use_bias=conv_bias, activation="silu")
        self.x_proj = linear(scope / "x_proj", channels, rank + 2 * state_size, axes=(None, "heads"))
        self.dt_proj = linear(never_quantized(scope / "dt_proj"), rank, channels, axes=("heads", None), use_bias=True)
        # In float32 regardless of the model's type, as the decays' logarithms are.
        shape = (channels, state_size)
        self.A_log = make_parameter(scope.rngs, nnx.initializers.zeros, shape, jnp.float32, axes=("heads", None))
        self.D = make_parameter(scope.rngs, nnx.initializers.ones, (channels,), jnp.float32, axes=("heads",))
        self.out_proj = linear(scope / "out_proj", channels, size, axes=out_axes, use_bias=use_bias)
        self.dt_layernorm: Norm | None = None
        self.b_layernorm: Norm | None = None
        self.c_layernorm: Norm | None = None
        if norm_epsilon is not None:
            self.dt_layernorm, self.b_layernorm, self.c_layernorm = (
                rms_norm(scope, features, epsilon=norm_epsilon, use_weight=norm_weights)
                for features in (rank, state_size, state_size)
            )

    @property
    def state_cache_spec(self) -> StateCacheSpec:
        # Channels last, since the vectors of every device are longer than N.
        shape = (self.sizes.state_size, self.sizes.num_channels)
        return StateCacheSpec((self.conv1d.state_array, StateArray(shape, (None, "heads"), jnp.float32)))

    def __call__(self, kv_cache: State, x: jax.Array, metadata: AttentionMetadata) -> tuple[State, jax.Array]:
        inputs, recurrent = (None, None) if kv_cache is None else kv_cache
        values, z = jnp.split(self.in_proj(x), 2, axis=-1)
        inputs, values = self.conv1d(inputs, values, metadata)
        dt, b, c = self._steps(values)
        rates = -in_whole_vectors(jnp.exp, self.A_log[...])
        operands = ScanOperands(values, dt, rates, b, c, self.D[...], metadata.states(recurrent))
        recurrent, out = selective_scan(operands)
        out = gated(out.astype(jnp.float32), z, "silu").astype(x.dtype)
        state = None if inputs is None or recurrent is None else (inputs, recurrent)
        return state, self.out_proj(out)

    def _steps(self, values: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns time steps float32 [T, I], and B and C [T, N], for values [T, I]."""
        rank, state_size = self.sizes.time_step_rank, self.sizes.state_size
        parts = jnp.split(self.x_proj(values), [rank, rank + state_size], axis=-1)
        norms = (self.dt_layernorm, self.b_layernorm, self.c_layernorm)
        dt, b, c = (part if norm is None else norm(part) for part, norm in zip(parts, norms, strict=True))
        assert self.dt_proj.bias is not None
        steps = softplus(self.dt_proj.product(dt).astype(jnp.float32), self.dt_proj.bias[...].astype(jnp.float32))
        return steps, b, c
