"""OLMo 2 (arXiv:2501.00656): norms after attention and MLP, and over all query and key heads together."""

from __future__ import annotations

import jax

from jaxis.config.rope_config import rope_config
from jaxis.layers.attention import attention
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.kv_cache_spec import KVCacheSpec
from jaxis.layers.leaves import linear, rms_norm
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule
from jaxis.layers.rope import make_rotary_embedding
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM


class Olmo2Attention(JaxModule):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        hidden_size, use_bias = config["hidden_size"], config.get("attention_bias", False)
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config.get("num_key_value_heads", self.num_heads)
        self.head_dim = config.get("head_dim", hidden_size // self.num_heads)
        self.rope = make_rotary_embedding(
            rope_config(config), head_dim=self.head_dim, max_model_len=scope.max_model_len
        )
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        heads, kv_heads = ("heads", "embed"), ("kv_heads", "embed")
        self.q_proj = linear(scope / "q_proj", hidden_size, q_size, axes=heads, use_bias=use_bias)
        self.k_proj = linear(scope / "k_proj", hidden_size, kv_size, axes=kv_heads, use_bias=use_bias)
        self.v_proj = linear(scope / "v_proj", hidden_size, kv_size, axes=kv_heads, use_bias=use_bias)
        self.o_proj = linear(scope / "o_proj", q_size, hidden_size, axes=("embed", "heads"), use_bias=use_bias)
        self.q_norm = rms_norm(scope / "q_norm", q_size)
        self.k_norm = rms_norm(scope / "k_norm", kv_size)

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """The cache that the engine allocates for this layer."""
        return KVCacheSpec(self.num_kv_heads, self.head_dim)

    def __call__(
        self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        q = self.q_norm(self.q_proj(x)).reshape(-1, self.num_heads, self.head_dim)
        k = self.k_norm(self.k_proj(x)).reshape(-1, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(-1, self.num_kv_heads, self.head_dim)
        kv_cache, out = attention(kv_cache, q, k, v, metadata, rope=self.rope, scale=self.head_dim**-0.5)
        return kv_cache, self.o_proj(out.reshape(x.shape[0], -1))


class Olmo2DecoderLayer(JaxModule):
    """`x = x + norm(self_attn(x))`
    `x = x + norm(mlp(x))`"""

    def __init__(self, scope: LayerScope) -> None:
        self.self_attn = Olmo2Attention(scope / "self_attn")
        self.mlp = GatedMLP(scope / "mlp")
        self.post_attention_layernorm = rms_norm(scope / "post_attention_layernorm")
        self.post_feedforward_layernorm = rms_norm(scope / "post_feedforward_layernorm")

    def __call__(
        self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        kv_cache, attended = self.self_attn(kv_cache, x, metadata)
        x = x + self.post_attention_layernorm(attended)
        return kv_cache, x + self.post_feedforward_layernorm(self.mlp(x))


class Olmo2ForCausalLM(CausalLM):
    layer_class = Olmo2DecoderLayer
