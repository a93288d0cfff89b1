"""Gated delta networks: linear attention whose state is corrected by its prediction error (arXiv:2412.06464)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.kernels.delta_rule import DeltaRuleOperands, gated_delta_rule
from jaxis.kernels.gates import gated
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.causal_conv import CausalConv
from jaxis.layers.decay_gate import DecayGate
from jaxis.layers.leaves import linear
from jaxis.layers.linear import apply_together
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.norm import GatedHeadNorm
from jaxis.layers.scope import LayerScope, never_quantized
from jaxis.layers.state_cache_spec import StateArray, StateCacheSpec

_DECAY = DecayGate(per_channel=False)
_L2_NORM_EPSILON = 1e-6

State = tuple[jax.Array, jax.Array] | None
"""Inputs of the convolution and the recurrent state; None without a cache."""


class Projections(NamedTuple):
    """Projections of a token in a gated delta network.

    Attributes:
      qkv: [T, 2 Hk dk + Hv dv]: queries, keys and values, all heads of each, before the convolution.
      z: [T, Hv dv], gates of the output.
      b: [T, Hv], logits of the rates at which the state is corrected.
      a: [T, Hv], logits of the decays.
    """

    qkv: jax.Array
    z: jax.Array
    b: jax.Array
    a: jax.Array


class GatedDeltaNet(JaxModule):
    """Convolution, gated delta rule, norm and gate, with the projections of Qwen3.5.

    Sizes are config.json's: `linear_num_key_heads` Hk of `linear_key_head_dim` dk, `linear_num_value_heads` Hv of
    `linear_value_head_dim` dv, `linear_conv_kernel_dim` W. Hv / Hk consecutive value heads share a key head. A family
    whose checkpoints lay the projections out differently overrides `make_projections` and `project`.

    Args:
      gate_activation: Activation of the output's gate.

    Raises ConfigError if the key heads do not divide the value heads, or W is not supported.
    """

    def __init__(self, scope: LayerScope, gate_activation: str = "silu") -> None:
        config = scope.config
        self.num_key_heads: int = config["linear_num_key_heads"]
        self.num_value_heads: int = config["linear_num_value_heads"]
        self.key_dim: int = config["linear_key_head_dim"]
        self.value_dim: int = config["linear_value_head_dim"]
        if self.num_key_heads < 1 or self.num_value_heads % self.num_key_heads:
            raise config.fault(
                "linear_num_key_heads",
                "linear_num_value_heads",
                why="expected a number that divides the second: correct the file",
            )
        self.keys_size, self.values_size = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        self.make_projections(scope)
        self.conv1d = CausalConv(
            scope / "conv1d",
            2 * self.keys_size + self.values_size,
            config["linear_conv_kernel_dim"],
            use_bias=False,
            activation="silu",
        )
        # In float32 regardless of the model's type, as the decays' logarithms are.
        shape, axes = (self.num_value_heads,), ("heads",)
        self.A_log = make_parameter(scope.rngs, nnx.initializers.zeros, shape, jnp.float32, axes=axes)
        self.dt_bias = make_parameter(scope.rngs, nnx.initializers.ones, shape, jnp.float32, axes=axes)
        self.norm = GatedHeadNorm(
            self.value_dim, scope.rngs, epsilon=config["rms_norm_eps"], activation=gate_activation, dtype=scope.dtype
        )
        size_out = config["hidden_size"]
        self.out_proj = linear(scope / "out_proj", self.values_size, size_out, axes=("embed", "heads"))

    def make_projections(self, scope: LayerScope) -> None:
        size_in: int = scope.config["hidden_size"]
        heads = ("heads", "embed")
        self.in_proj_qkv = linear(scope / "in_proj_qkv", size_in, 2 * self.keys_size + self.values_size, axes=heads)
        self.in_proj_z = linear(scope / "in_proj_z", size_in, self.values_size, axes=heads)
        self.in_proj_b = linear(never_quantized(scope / "in_proj_b"), size_in, self.num_value_heads, axes=heads)
        self.in_proj_a = linear(never_quantized(scope / "in_proj_a"), size_in, self.num_value_heads, axes=heads)

    def project(self, x: jax.Array) -> Projections:
        return Projections(*apply_together(x, self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a))

    @property
    def state_cache_spec(self) -> StateCacheSpec:
        shape = (self.num_value_heads, self.key_dim, self.value_dim)
        recurrent = StateArray(shape, ("heads", None, None), jnp.float32)
        return StateCacheSpec((self.conv1d.state_array, recurrent))

    def __call__(self, kv_cache: State, x: jax.Array, metadata: AttentionMetadata) -> tuple[State, jax.Array]:
        num_tokens = x.shape[0]
        inputs, recurrent = (None, None) if kv_cache is None else kv_cache
        qkv, z, b, a = self.project(x)
        inputs, qkv = self.conv1d(inputs, qkv, metadata)
        q, k, v = jnp.split(qkv, [self.keys_size, 2 * self.keys_size], axis=-1)
        operands = DeltaRuleOperands(
            q=q.reshape(num_tokens, self.num_key_heads, self.key_dim),
            k=k.reshape(num_tokens, self.num_key_heads, self.key_dim),
            v=v.reshape(num_tokens, self.num_value_heads, self.value_dim),
            log_decay=_DECAY(a, self.A_log[...], self.dt_bias[...]),
            beta=gated(jnp.ones_like(b, jnp.float32), b.astype(jnp.float32), "sigmoid"),
            states=metadata.states(recurrent),
        )
        recurrent, out = gated_delta_rule(operands, l2_norm_epsilon=_L2_NORM_EPSILON, scale=self.key_dim**-0.5)
        state = None if inputs is None or recurrent is None else (inputs, recurrent)
        return state, self.out_proj(self.norm(out, z))
