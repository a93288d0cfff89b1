"""Qwen3 (dense): the Llama layer with a norm on each query and key head, and an optional sliding window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx

from jaxis.layers.decoder_layer import PreNormDecoderLayer, attention_from_config, mlp_from_config
from jaxis.models.common.decoder import CausalLM
from jaxis.models.qwen2 import layer_sliding_window

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class Qwen3DecoderLayer(PreNormDecoderLayer):
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
                vllm_config,
                rng,
                quant_config,
                f"{prefix}.self_attn",
                head_dim=128,
                qkv_bias=attention_bias,
                o_bias=attention_bias,
                qk_norm=True,
                sliding_window=layer_sliding_window(config, layer_index),
            ),
            mlp=mlp_from_config(vllm_config, rng, quant_config, f"{prefix}.mlp"),
        )


class Qwen3ForCausalLM(CausalLM):
    layer_class = Qwen3DecoderLayer
