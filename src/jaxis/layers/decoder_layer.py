"""The pre-norm decoder layer of the Llama lineage: norm, attention, add; norm, gated MLP, add."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from flax import nnx

from jaxis.layers.attention import GroupedQueryAttention
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.mlp import GatedMLP, activation_function
from jaxis.layers.module import JaxModule
from jaxis.layers.norm import JaxRmsNorm
from jaxis.layers.rope import make_rotary_embedding
from jaxis.rope_config import rope_config

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class PreNormDecoderLayer(JaxModule):
    """Sizes, epsilon, activation and rope come from config.json; what families differ in are arguments.

    Args:
      vllm_config: The engine's configuration.
      rng: For the initial weights.
      quant_config: How linear layers are stored, if not plainly.
      prefix: The layer's dotted name.
      head_dim: D where config.json names none; None is hidden_size / num_attention_heads.
      qkv_bias, o_bias, mlp_bias: Which projections have biases.
      qk_norm: Whether queries and keys get an RMS norm a head.
      sliding_window: A token sees itself and this many - 1 before it; None sees all.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        rng: nnx.Rngs,
        quant_config: QuantizationConfig | None,
        prefix: str,
        *,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        sliding_window: int | None = None,
    ) -> None:
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        hidden_size, num_heads, epsilon = config["hidden_size"], config["num_attention_heads"], config["rms_norm_eps"]
        head_dim = config.get("head_dim", head_dim or hidden_size // num_heads)
        self.input_layernorm = JaxRmsNorm(hidden_size, rng, epsilon=epsilon, dtype=dtype)
        self.self_attn = GroupedQueryAttention(
            hidden_size,
            num_heads,
            config.get("num_key_value_heads", num_heads),
            head_dim,
            rng,
            rope=make_rotary_embedding(
                rope_config(config), head_dim=head_dim, max_model_len=vllm_config.model_config.max_model_len
            ),
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm_epsilon=epsilon if qk_norm else None,
            sliding_window=sliding_window,
            dtype=dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.self_attn",
        )
        self.post_attention_layernorm = JaxRmsNorm(hidden_size, rng, epsilon=epsilon, dtype=dtype)
        self.mlp = GatedMLP(
            hidden_size,
            config["intermediate_size"],
            rng,
            activation=activation_function(config.get("hidden_act", "silu")),
            use_bias=mlp_bias,
            dtype=dtype,
            quant_config=quant_config,
            prefix=f"{prefix}.mlp",
        )

    def __call__(
        self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        kv_cache, attended = self.self_attn(kv_cache, self.input_layernorm(x), metadata)
        x = x + attended
        return kv_cache, x + self.mlp(self.post_attention_layernorm(x))
