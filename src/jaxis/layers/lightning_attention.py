from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.kernels.gates import gated
from jaxis.kernels.ssd import SsdOperands, ssd
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.module import JaxModule
from jaxis.layers.norm import norm_each_group
from jaxis.layers.rope import RotaryEmbedding
from jaxis.layers.scope import LayerScope
from jaxis.layers.state_cache_spec import StateArray, StateCacheSpec

State = tuple[jax.Array] | None
"""The recurrent state; None without a cache."""


class LightningAttention(JaxModule):
    """Linear attention whose states decay at a constant rate of each head (arXiv:2401.04658):

    `S = exp(-rate) * S + v k^T`
    `o_proj(norm(S q / sqrt(D)) * sigmoid(g_proj(x)))`

    Queries and keys have an RMS norm over each head, then the rope. It computes in float32.

    Args:
      rates: The rates of H heads, positive.
      num_groups: Equal parts of the heads' outputs that are normed one by one.
    """

    def __init__(
        self, scope: LayerScope, *, head_dim: int, rates: Sequence[float], rope: RotaryEmbedding, num_groups: int
    ) -> None:
        size: int = scope.config["hidden_size"]
        self.rates, self.head_dim, self.rope, self.num_groups = tuple(rates), head_dim, rope, num_groups
        inner = len(self.rates) * head_dim
        self.qkv_proj = linear(scope / "qkv_proj", size, 3 * inner, axes=("heads", "embed"))
        self.q_norm, self.k_norm = rms_norm(scope, head_dim), rms_norm(scope, head_dim)
        self.g_proj = linear(scope / "g_proj", size, inner, axes=("heads", "embed"))
        self.g_norm = rms_norm(scope, inner)
        self.o_proj = linear(scope / "o_proj", inner, size, axes=("embed", "heads"))

    @property
    def state_cache_spec(self) -> StateCacheSpec:
        shape = (len(self.rates), self.head_dim, self.head_dim)
        return StateCacheSpec((StateArray(shape, ("heads", None, None), jnp.float32),))

    def __call__(self, kv_cache: State, x: jax.Array, metadata: AttentionMetadata) -> tuple[State, jax.Array]:
        num_tokens, num_heads = x.shape[0], len(self.rates)
        qkv = self.qkv_proj(x).astype(jnp.float32).reshape(num_tokens, 3, num_heads, self.head_dim)
        q, k = self.rope(self.q_norm(qkv[:, 0]), self.k_norm(qkv[:, 1]), metadata.input_positions)
        operands = SsdOperands(
            x=qkv[:, 2],
            dt=jnp.ones((num_tokens, num_heads), jnp.float32),
            a=-jnp.asarray(np.array(self.rates, np.float32)),
            b=k,
            c=q * self.head_dim**-0.5,
            d=None,
            states=metadata.states(None if kv_cache is None else kv_cache[0]),
        )
        state, out = ssd(operands)
        normed = norm_each_group(out.reshape(num_tokens, self.num_groups, -1), self.g_norm)
        out = gated(normed.reshape(num_tokens, -1), self.g_proj(x), "sigmoid").astype(x.dtype)
        return None if state is None else (state,), self.o_proj(out)
