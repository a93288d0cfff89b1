"""Mamba2: a short convolution and a selective state space with one decay per head (arXiv:2405.21060)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.errors import ConfigError
from jaxis.kernels.gates import gated, softplus
from jaxis.kernels.materialize import in_whole_vectors, materialize
from jaxis.kernels.ssd import SsdOperands, ssd
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.causal_conv import CausalConv
from jaxis.layers.leaves import linear
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.norm import GatedRmsNorm
from jaxis.layers.scope import LayerScope
from jaxis.layers.state_cache_spec import StateArray, StateCacheSpec

State = tuple[jax.Array, jax.Array] | None
"""Inputs of the convolution and the recurrent state; None without a cache."""


@dataclass(frozen=True, kw_only=True)
class Mamba2Sizes:
    """Sizes of a Mamba2 layer, which families name differently in config.json.

    Attributes:
      num_heads: H.
      head_dim: P.
      state_size: N.
      num_groups: G; H / G consecutive heads share the inputs' and outputs' weights B and C.
      conv_width: Taps of the convolution.

    Raises:
      ConfigError: On construction, if the groups do not divide the heads.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int

    def __post_init__(self) -> None:
        if self.num_groups < 1 or self.num_heads % self.num_groups:
            raise ConfigError(f"{self.num_heads} heads of Mamba2 cannot be divided into {self.num_groups} groups")

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def projections(self) -> tuple[int, int, int, int, int]:
        """Number of features of each part of `in_proj`'s output: z, x, B, C and the time steps."""
        group_size = self.num_groups * self.state_size
        return self.inner_size, self.inner_size, group_size, group_size, self.num_heads


class Mamba2(JaxModule):
    """Projections, convolution, recurrence, and a gated norm.

    Args:
      conv_bias: True if the convolution has a bias.
      in_bias, out_bias: True if the projections have biases.
      norm_epsilon: Epsilon of the norm over each group of the heads' outputs; None for no norm: outputs are only gated.
      multipliers: Multipliers of z, x, B, C and the time steps; None for none.
    """

    def __init__(
        self,
        scope: LayerScope,
        sizes: Mamba2Sizes,
        *,
        conv_bias: bool,
        in_bias: bool,
        out_bias: bool,
        norm_epsilon: float | None,
        multipliers: tuple[float, ...] | None = None,
    ) -> None:
        self.sizes, self.multipliers = sizes, multipliers
        size: int = scope.config["hidden_size"]
        projected = sum(sizes.projections)
        self.in_proj = linear(scope / "in_proj", size, projected, axes=("heads", "embed"), use_bias=in_bias)
        _, *convolved, _ = sizes.projections
        self.conv1d = CausalConv(
            scope / "conv1d", sum(convolved), sizes.conv_width, use_bias=conv_bias, activation="silu"
        )
        # In float32 regardless of the model's type, as the decays' logarithms are.
        shape, axes = (sizes.num_heads,), ("heads",)
        self.A_log = make_parameter(scope.rngs, nnx.initializers.zeros, shape, jnp.float32, axes=axes)
        self.D = make_parameter(scope.rngs, nnx.initializers.ones, shape, jnp.float32, axes=axes)
        self.dt_bias = make_parameter(scope.rngs, nnx.initializers.ones, shape, jnp.float32, axes=axes)
        self.norm = None
        if norm_epsilon is not None:
            self.norm = GatedRmsNorm(
                sizes.inner_size, sizes.num_groups, scope.rngs, epsilon=norm_epsilon, dtype=scope.dtype
            )
        out_axes = ("embed", "heads")
        self.out_proj = linear(scope / "out_proj", sizes.inner_size, size, axes=out_axes, use_bias=out_bias)

    @property
    def state_cache_spec(self) -> StateCacheSpec:
        sizes = self.sizes
        shape = (sizes.num_heads, sizes.head_dim, sizes.state_size)
        recurrent = StateArray(shape, ("heads", None, None), jnp.float32)
        return StateCacheSpec((self.conv1d.state_array, recurrent))

    def __call__(self, kv_cache: State, x: jax.Array, metadata: AttentionMetadata) -> tuple[State, jax.Array]:
        num_tokens, sizes = x.shape[0], self.sizes
        inputs, recurrent = (None, None) if kv_cache is None else kv_cache
        z, convolved, dt = self._project(x)
        inputs, convolved = self.conv1d(inputs, convolved, metadata)
        _, x_size, b_size, _, _ = sizes.projections
        values, b, c = jnp.split(convolved, [x_size, x_size + b_size], axis=-1)
        operands = SsdOperands(
            x=values.reshape(num_tokens, sizes.num_heads, sizes.head_dim),
            dt=softplus(dt.astype(jnp.float32), self.dt_bias[...]),
            a=-in_whole_vectors(jnp.exp, self.A_log[...]),
            b=b.reshape(num_tokens, sizes.num_groups, sizes.state_size),
            c=c.reshape(num_tokens, sizes.num_groups, sizes.state_size),
            d=self.D[...],
            states=metadata.states(recurrent),
        )
        recurrent, out = ssd(operands)
        out = out.reshape(num_tokens, sizes.inner_size).astype(jnp.float32)
        out = (gated(out, z, "silu") if self.norm is None else self.norm(out, z)).astype(x.dtype)
        state = None if inputs is None or recurrent is None else (inputs, recurrent)
        return state, self.out_proj(out)

    def _project(self, x: jax.Array) -> list[jax.Array]:
        """Returns z [T, H P], the input of the convolution [T, H P + 2 G N], and the time steps [T, H] for x [T, E]."""
        z_size, *convolved, _ = self.sizes.projections
        projected = self.in_proj(x)
        if self.multipliers is not None:
            factors = np.repeat(np.asarray(self.multipliers, np.float32), self.sizes.projections)
            projected = materialize((projected.astype(jnp.float32) * factors).astype(projected.dtype))
        return jnp.split(projected, [z_size, z_size + sum(convolved)], axis=-1)
