"""Granite 3 (dense): the Llama layer with multipliers on embeddings, scores, residuals and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx

from jaxis.layers.decoder_layer import PreNormDecoderLayer, attention_from_config, mlp_from_config
from jaxis.models.common.decoder import CausalLM

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class GraniteDecoderLayer(PreNormDecoderLayer):
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
        use_bias = config.get("attention_bias", False)
        super().__init__(
            vllm_config,
            rng,
            self_attn=attention_from_config(
                vllm_config,
                rng,
                quant_config,
                f"{prefix}.self_attn",
                scale=config.get("attention_multiplier", 1.0),
                qkv_bias=use_bias,
                o_bias=use_bias,
            ),
            mlp=mlp_from_config(
                vllm_config, rng, quant_config, f"{prefix}.mlp", use_bias=config.get("mlp_bias", False)
            ),
            residual_multiplier=config.get("residual_multiplier", 1.0),
        )


class GraniteForCausalLM(CausalLM):
    layer_class = GraniteDecoderLayer

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        config = vllm_config.model_config.hf_config
        super().__init__(
            vllm_config,
            rng,
            quant_config,
            embedding_multiplier=config.get("embedding_multiplier", 1.0),
            logits_multiplier=1.0 / config.get("logits_scaling", 1.0),
        )
