"""OLMo 2 (arXiv:2501.00656): norms after attention and MLP, and over all query and key heads together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from flax import nnx

from jaxis.config.rope_config import rope_config
from jaxis.layers.attention import attention
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.kv_cache_spec import KVCacheSpec
from jaxis.layers.linear import JaxLinear
from jaxis.layers.mlp import GatedMLP, activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.norm import JaxRmsNorm
from jaxis.layers.rope import make_rotary_embedding
from jaxis.models.common.decoder import CausalLM

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class Olmo2Attention(JaxModule):
    def __init__(
        self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        hidden_size, epsilon = config["hidden_size"], config["rms_norm_eps"]
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config.get("num_key_value_heads", self.num_heads)
        self.head_dim = config.get("head_dim", hidden_size // self.num_heads)
        self.rope = make_rotary_embedding(
            rope_config(config), head_dim=self.head_dim, max_model_len=vllm_config.model_config.max_model_len
        )
        use_bias = config.get("attention_bias", False)

        def linear(name: str, size_in: int, size_out: int, axes: tuple[str, str]) -> JaxLinear:
            return JaxLinear(
                size_in,
                size_out,
                rng,
                use_bias=use_bias,
                dtype=dtype,
                kernel_axes=axes,
                quant_config=quant_config,
                prefix=f"{prefix}.{name}",
            )

        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = linear("q_proj", hidden_size, q_size, ("heads", "embed"))
        self.k_proj = linear("k_proj", hidden_size, kv_size, ("kv_heads", "embed"))
        self.v_proj = linear("v_proj", hidden_size, kv_size, ("kv_heads", "embed"))
        self.o_proj = linear("o_proj", q_size, hidden_size, ("embed", "heads"))
        self.q_norm = JaxRmsNorm(q_size, rng, epsilon=epsilon, dtype=dtype)
        self.k_norm = JaxRmsNorm(kv_size, rng, epsilon=epsilon, dtype=dtype)

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """What the engine allocates for this layer."""
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
    def __init__(
        self,
        vllm_config: VllmConfig,
        rng: nnx.Rngs,
        quant_config: QuantizationConfig | None,
        *,
        layer_index: int,
        prefix: str,
    ) -> None:
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        hidden_size, epsilon = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = Olmo2Attention(vllm_config, rng, quant_config, f"{prefix}.self_attn")
        self.mlp = GatedMLP(
            hidden_size,
            config["intermediate_size"],
            rng,
            activation=activation_function(config.get("hidden_act", "silu")),
            dtype=dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.mlp",
        )
        self.post_attention_layernorm = JaxRmsNorm(hidden_size, rng, epsilon=epsilon, dtype=dtype)
        self.post_feedforward_layernorm = JaxRmsNorm(hidden_size, rng, epsilon=epsilon, dtype=dtype)

    def __call__(
        self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        kv_cache, attended = self.self_attn(kv_cache, x, metadata)
        x = x + self.post_attention_layernorm(attended)
        return kv_cache, x + self.post_feedforward_layernorm(self.mlp(x))


class Olmo2ForCausalLM(CausalLM):
    layer_class = Olmo2DecoderLayer
