"""OLMo 2 (arXiv:2501.00656): norms after attention and MLP, and over all query and all key heads together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx

from jaxis.config.rope_config import RopeConfig
from jaxis.layers.attention import GroupedQueryAttention
from jaxis.layers.decoder_layer import PostNormDecoderLayer, attention_from_config, mlp_from_config
from jaxis.layers.norm import rms_norm_from_config
from jaxis.models.common.decoder import CausalLM

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class Olmo2DecoderLayer(PostNormDecoderLayer):
    def __init__(
        self,
        vllm_config: VllmConfig,
        rng: nnx.Rngs,
        quant_config: QuantizationConfig | None,
        *,
        layer_index: int,
        prefix: str,
    ) -> None:
        super().__init__(
            vllm_config,
            rng,
            self_attn=olmo_attention(vllm_config, rng, quant_config, f"{prefix}.self_attn"),
            mlp=mlp_from_config(vllm_config, rng, quant_config, f"{prefix}.mlp"),
        )


def olmo_attention(
    vllm_config: VllmConfig,
    rng: nnx.Rngs,
    quant_config: QuantizationConfig | None,
    prefix: str,
    *,
    rope_settings: RopeConfig | None = None,
    sliding_window: int | None = None,
) -> GroupedQueryAttention:
    """Attention with one norm over all query heads and one over all key heads.

    Args:
      vllm_config, rng, quant_config, prefix: As for `JaxLinear`.
      rope_settings, sliding_window: As for `attention_from_config`.
    """
    config = vllm_config.model_config.hf_config
    num_heads, use_bias = config["num_attention_heads"], config.get("attention_bias", False)
    head_dim = config.get("head_dim", config["hidden_size"] // num_heads)
    return attention_from_config(
        vllm_config,
        rng,
        quant_config,
        prefix,
        rope_settings=rope_settings,
        qkv_bias=use_bias,
        o_bias=use_bias,
        q_norm=rms_norm_from_config(vllm_config, rng, num_heads * head_dim),
        k_norm=rms_norm_from_config(vllm_config, rng, config.get("num_key_value_heads", num_heads) * head_dim),
        sliding_window=sliding_window,
    )


class Olmo2ForCausalLM(CausalLM):
    layer_class = Olmo2DecoderLayer
