"""Qwen2 and Qwen2.5: the Llama layer with biases on queries, keys and values, and an optional sliding window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx

from jaxis.errors import ConfigError
from jaxis.layers.decoder_layer import PreNormDecoderLayer, attention_from_config, mlp_from_config
from jaxis.models.common.decoder import CausalLM

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig
    from jaxis.quantization.config import QuantizationConfig


def layer_sliding_window(config: HFConfig, layer_index: int) -> int | None:
    """The window of a Qwen2 or Qwen3 layer: `layer_types` where config.json has it, else layers past a limit."""
    layer_types = config.get("layer_types")
    use_window = config.get("use_sliding_window", False)
    window, first_window_layer = config.get("sliding_window", 4096), config.get("max_window_layers", 28)
    if layer_types is None:
        return window if use_window and layer_index >= first_window_layer else None
    kind = layer_types[layer_index]
    if kind not in ("full_attention", "sliding_attention"):
        raise ConfigError(f"layer_types[{layer_index}]={kind!r} in config.json is not supported by this family")
    return window if use_window and kind == "sliding_attention" else None


class Qwen2DecoderLayer(PreNormDecoderLayer):
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
            self_attn=attention_from_config(
                vllm_config,
                rng,
                quant_config,
                f"{prefix}.self_attn",
                qkv_bias=True,
                sliding_window=layer_sliding_window(vllm_config.model_config.hf_config, layer_index),
            ),
            mlp=mlp_from_config(vllm_config, rng, quant_config, f"{prefix}.mlp"),
        )


class Qwen2ForCausalLM(CausalLM):
    layer_class = Qwen2DecoderLayer
