"""Llama 2, 3, 3.1, 3.2 (text) and 3.3: grouped-query attention, gated MLP, RMS norm before each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx

from jaxis.layers.decoder_layer import PreNormDecoderLayer, attention_from_config, mlp_from_config
from jaxis.models.common.decoder import CausalLM

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class LlamaDecoderLayer(PreNormDecoderLayer):
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
        attention_bias = config.get("attention_bias", False)
        super().__init__(
            vllm_config,
            rng,
            self_attn=attention_from_config(
                vllm_config, rng, quant_config, f"{prefix}.self_attn", qkv_bias=attention_bias, o_bias=attention_bias
            ),
            mlp=mlp_from_config(
                vllm_config, rng, quant_config, f"{prefix}.mlp", use_bias=config.get("mlp_bias", False)
            ),
        )


class LlamaForCausalLM(CausalLM):
    layer_class = LlamaDecoderLayer
