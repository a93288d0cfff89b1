"""Linear attention by the gated delta rule, with a projection and a short convolution each for queries, keys, values.

It is Kimi Delta Attention (arXiv:2510.26692), whose states decay channel by channel, and the gated delta networks
(arXiv:2412.06464) of OLMo Hybrid. `layers.gated_delta_net` is the form with packed projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxis.errors import ConfigError
from jaxis.kernels.delta_rule import DeltaRuleOperands, gated_delta_rule
from jaxis.kernels.gates import gated
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.causal_conv import CausalConv
from jaxis.layers.decay_gate import DecayGate
from jaxis.layers.leaves import linear
from jaxis.layers.linear import JaxLinear, apply_together, load_reshaped
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.norm import GatedHeadNorm
from jaxis.layers.scope import LayerScope, never_quantized
from jaxis.layers.state_cache_spec import StateArray, StateCacheSpec

_L2_NORM_EPSILON = 1e-6

State = tuple[jax.Array | None, ...] | None
"""Inputs of the convolutions of queries, keys and values, and the recurrent state; None without a cache."""


@dataclass(frozen=True)
class DeltaAttentionSizes:
    """Heads and their dimensions.

    Attributes:
      num_key_heads: Hk, the heads of queries and keys.
      num_value_heads: Hv; Hv / Hk consecutive value heads share a key head.
      key_dim: dk.
      value_dim: dv.
      conv_width: W, the tokens that a convolution sees.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int


class DeltaAttention(JaxModule):
    """`o_proj(norm(delta_rule(q, k, v)) * activation(gate(x)))`, each of q, k and v convolved over time.

    Args:
      decay_names: Names in the checkpoint of the layer that computes the logits of decays, or of two layers that are
        applied one after the other, with dv features between them.
      gate_names: Names of the layers that compute the logits of the output's gates, likewise.
      gate_activation: Activation of these gates, a key of `jaxis.kernels.gates.ACTIVATIONS`.
      norm_epsilon: Epsilon of the output's norm.
      beta_scale: Largest rate at which the state is corrected; with 2, it can be reflected.

    Raises:
      ConfigError: The key heads do not divide the value heads, or W is not supported.
    """

    def __init__(
        self,
        scope: LayerScope,
        sizes: DeltaAttentionSizes,
        *,
        decay: DecayGate,
        decay_names: Sequence[str],
        gate_names: Sequence[str],
        gate_activation: str,
        norm_epsilon: float,
        beta_scale: float = 1.0,
    ) -> None:
        if sizes.num_key_heads < 1 or sizes.num_value_heads % sizes.num_key_heads:
            raise ConfigError(
                f"{scope.config.source} gives linear attention {sizes.num_key_heads} key heads, which must divide "
                f"its {sizes.num_value_heads} value heads: correct the file"
            )
        self.sizes, self.decay, self.beta_scale = sizes, decay, beta_scale
        self.decay_names, self.gate_names = tuple(decay_names), tuple(gate_names)
        size_in: int = scope.config["hidden_size"]
        keys_size, values_size = sizes.num_key_heads * sizes.key_dim, sizes.num_value_heads * sizes.value_dim
        heads = ("heads", "embed")
        for name, size in (("q", keys_size), ("k", keys_size), ("v", values_size)):
            setattr(self, f"{name}_proj", linear(scope / f"{name}_proj", size_in, size, axes=heads))
            conv = CausalConv(
                scope / f"{name}_conv1d",
                size,
                sizes.conv_width,
                use_bias=False,
                activation="silu",
                dtype=jnp.float32,  # that of many checkpoints, and of the computation
            )
            setattr(self, f"{name}_conv1d", conv)
        self.b_proj = linear(never_quantized(scope / "b_proj"), size_in, sizes.num_value_heads, axes=heads)
        num_decays = sizes.num_value_heads * (sizes.key_dim if decay.per_channel else 1)
        # One number per head decides much; one of many per channel decides little.
        self._make_layers(scope if decay.per_channel else never_quantized(scope), self.decay_names, num_decays)
        self._make_layers(scope, self.gate_names, values_size)
        zeros, ones = nnx.initializers.zeros, nnx.initializers.ones
        shape = (sizes.num_value_heads,)
        # In float32 regardless of the model's type, as the decays' logarithms are. Some files have axes of size one.
        self.A_log = make_parameter(scope.rngs, zeros, shape, jnp.float32, axes=("heads",), weight_loader=load_reshaped)
        self.dt_bias = make_parameter(
            scope.rngs, ones, (num_decays,), jnp.float32, axes=("heads",), weight_loader=load_reshaped
        )
        self.o_norm = GatedHeadNorm(
            sizes.value_dim, scope.rngs, epsilon=norm_epsilon, activation=gate_activation, dtype=scope.dtype
        )
        self.o_proj = linear(scope / "o_proj", values_size, size_in, axes=("embed", "heads"))

    def _make_layers(self, scope: LayerScope, names: Sequence[str], size_out: int) -> None:
        size_in: int = scope.config["hidden_size"]
        if len(names) == 1:
            setattr(self, names[0], linear(scope / names[0], size_in, size_out, axes=("heads", "embed")))
            return
        into, out_of = names
        rank = self.sizes.value_dim
        setattr(self, into, linear(scope / into, size_in, rank, axes=(None, "embed")))
        setattr(self, out_of, linear(scope / out_of, rank, size_out, axes=("heads", None)))

    @property
    def _convolutions(self) -> list[CausalConv]:
        return [getattr(self, f"{name}_conv1d") for name in "qkv"]

    @property
    def state_cache_spec(self) -> StateCacheSpec:
        shape = (self.sizes.num_value_heads, self.sizes.key_dim, self.sizes.value_dim)
        recurrent = StateArray(shape, ("heads", None, None), jnp.float32)
        return StateCacheSpec((*(conv.state_array for conv in self._convolutions), recurrent))

    def __call__(self, kv_cache: State, x: jax.Array, metadata: AttentionMetadata) -> tuple[State, jax.Array]:
        num_tokens, sizes = x.shape[0], self.sizes
        *inputs, recurrent = (None,) * 4 if kv_cache is None else kv_cache
        *qkv, b, f, z = self._project(x)
        convolved = [
            conv(state, rows, metadata) for conv, state, rows in zip(self._convolutions, inputs, qkv, strict=True)
        ]
        q, k, v = (rows for _, rows in convolved)
        b = b.astype(jnp.float32)
        log_decay = self.decay(f, self.A_log[...], self.dt_bias[...])
        operands = DeltaRuleOperands(
            q=q.reshape(num_tokens, sizes.num_key_heads, sizes.key_dim),
            k=k.reshape(num_tokens, sizes.num_key_heads, sizes.key_dim),
            v=v.reshape(num_tokens, sizes.num_value_heads, sizes.value_dim),
            log_decay=log_decay.reshape(num_tokens, sizes.num_value_heads, -1) if self.decay.per_channel else log_decay,
            beta=gated(jnp.full_like(b, self.beta_scale), b, "sigmoid"),
            states=metadata.states(recurrent),
        )
        recurrent, out = gated_delta_rule(operands, l2_norm_epsilon=_L2_NORM_EPSILON, scale=sizes.key_dim**-0.5)
        state = None if kv_cache is None else (*(inputs for inputs, _ in convolved), recurrent)
        return state, self.o_proj(self.o_norm(out, z))

    def _project(self, x: jax.Array) -> list[jax.Array]:
        """Returns queries, keys and values [T, heads * dimensions], and the logits of rates, decays and gates."""
        layers: list[list[JaxLinear]] = [
            [getattr(self, name) for name in names]
            for names in (("q_proj",), ("k_proj",), ("v_proj",), ("b_proj",), self.decay_names, self.gate_names)
        ]
        projected = apply_together(x, *(first for first, *_ in layers))
        return [rest[0](y) if rest else y for y, (_, *rest) in zip(projected, layers, strict=True)]
