"""GLM-4-0414 (dense): norms before and after each block, a rope that pairs neighbours of half a head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from flax import nnx

from jaxis.config.rope_config import rope_config
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import attention_from_config, mlp_from_config
from jaxis.layers.module import JaxModule
from jaxis.layers.norm import rms_norm_from_config
from jaxis.models.common.decoder import CausalLM

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class Glm4DecoderLayer(JaxModule):
    """`x + norm(self_attn(norm(x)))`, then `x + norm(mlp(norm(x)))`, under the checkpoint's names."""

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
        self.input_layernorm = rms_norm_from_config(vllm_config, rng)
        self.self_attn = attention_from_config(
            vllm_config,
            rng,
            quant_config,
            f"{prefix}.self_attn",
            head_dim=128,
            rope_settings=rope_config(config, default_partial_rotary_factor=0.5),
            interleaved_rope=True,
            qkv_bias=config.get("attention_bias", True),
        )
        self.post_self_attn_layernorm = rms_norm_from_config(vllm_config, rng)
        # What the checkpoint calls post-attention stands before the feed-forward block.
        self.post_attention_layernorm = rms_norm_from_config(vllm_config, rng)
        self.mlp = mlp_from_config(vllm_config, rng, quant_config, f"{prefix}.mlp", packed_gate_up=True)
        self.post_mlp_layernorm = rms_norm_from_config(vllm_config, rng)

    def __call__(
        self, kv_cache: jax.Array | None, x: jax.Array, metadata: AttentionMetadata
    ) -> tuple[jax.Array | None, jax.Array]:
        """x [T, E] -> the updated cache (None without one) and [T, E]."""
        kv_cache, attended = self.self_attn(kv_cache, self.input_layernorm(x), metadata)
        x = x + self.post_self_attn_layernorm(attended)
        return kv_cache, x + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(x)))


class Glm4ForCausalLM(CausalLM):
    layer_class = Glm4DecoderLayer
