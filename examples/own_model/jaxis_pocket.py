"""Pocket for jaxis: the same arithmetic from the building blocks that have a cache, batches and kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.module import JaxModule
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM


class PocketLayer(JaxModule):
    """`x + attention(norm(x)) + mlp(norm(x))`"""

    def __init__(self, scope: LayerScope) -> None:
        size, inner = scope.config["hidden_size"], scope.config["intermediate_size"]
        self.norm = rms_norm(scope / "norm")
        self.self_attn = GroupedQueryAttention(scope / "self_attn", qk_norm=True)
        self.up_proj = linear(scope / "up_proj", size, inner, axes=("mlp", "embed"))
        self.down_proj = linear(scope / "down_proj", inner, size, axes=("embed", "mlp"))

    def __call__(
        self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        normed = self.norm(x)
        kv_cache, attended = self.self_attn(kv_cache, normed, metadata)
        return kv_cache, x + attended + self.down_proj(jnp.square(jax.nn.relu(self.up_proj(normed))))


class PocketForCausalLM(CausalLM):
    layer_class = PocketLayer
