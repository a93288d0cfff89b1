"""Command R and R+ (Cohere): attention and MLP side by side after one layer norm, a rope that pairs neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from flax import nnx

from jaxis.config.rope_config import rope_config
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import attention_from_config, mlp_from_config
from jaxis.layers.module import JaxModule
from jaxis.layers.norm import JaxLayerNorm
from jaxis.models.common.decoder import CausalLM

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class ParallelDecoderLayer(JaxModule):
    """`x + self_attn(norm(x)) + mlp(norm(x))`.

    Args:
      vllm_config, rng: As for `PreNormDecoderLayer`.
      self_attn, mlp: As for `PreNormDecoderLayer`.
    """

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, *, self_attn: JaxModule, mlp: JaxModule) -> None:
        self.input_layernorm = cohere_norm(vllm_config, rng, vllm_config.model_config.hf_config["hidden_size"])
        self.self_attn = self_attn
        self.mlp = mlp

    def __call__(
        self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        normalised = self.input_layernorm(x)
        kv_cache, attended = self.self_attn(kv_cache, normalised, metadata)
        return kv_cache, x + attended + self.mlp(normalised)


def cohere_norm(vllm_config: VllmConfig, rng: nnx.Rngs, shape: int | tuple[int, ...]) -> JaxLayerNorm:
    """A layer norm without bias."""
    model_config = vllm_config.model_config
    epsilon = model_config.hf_config.get("layer_norm_eps", 1e-5)
    return JaxLayerNorm(shape, rng, epsilon=epsilon, use_bias=False, dtype=model_config.dtype)


class CohereDecoderLayer(ParallelDecoderLayer):
    def __init__(
        self,
        vllm_config: VllmConfig,
        rng: nnx.Rngs,
        quant_config: QuantizationConfig | None,
        *,
        layer_index: int,
        prefix: str,
    ) -> None:
        config = vllm_config.model_config.hf_config
        num_heads, use_bias = config["num_attention_heads"], config.get("attention_bias", False)
        head_dim = config.get("head_dim", config["hidden_size"] // num_heads)
        q_norm = k_norm = None
        if config.get("use_qk_norm", False):
            q_norm = cohere_norm(vllm_config, rng, (num_heads, head_dim))
            k_norm = cohere_norm(vllm_config, rng, (config.get("num_key_value_heads", num_heads), head_dim))
        super().__init__(
            vllm_config,
            rng,
            self_attn=attention_from_config(
                vllm_config,
                rng,
                quant_config,
                f"{prefix}.self_attn",
                rope_settings=rope_config(config, default_theta=500_000.0),
                interleaved_rope=True,
                qkv_bias=use_bias,
                o_bias=use_bias,
                q_norm=q_norm,
                k_norm=k_norm,
            ),
            mlp=mlp_from_config(vllm_config, rng, quant_config, f"{prefix}.mlp"),
        )


class CohereForCausalLM(CausalLM):
    layer_class = CohereDecoderLayer

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        config = vllm_config.model_config.hf_config
        super().__init__(
            vllm_config,
            rng,
            quant_config,
            tied_by_default=True,
            norm=cohere_norm(vllm_config, rng, config["hidden_size"]),
            logits_multiplier=config.get("logit_scale", 0.0625),
        )
