"""Mistral: the Llama layer, with a sliding window over all layers where config.json has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx

from jaxis.layers.decoder_layer import PreNormDecoderLayer, attention_from_config, mlp_from_config
from jaxis.models.common.decoder import CausalLM

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class MistralDecoderLayer(PreNormDecoderLayer):
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
        # A config.json without the key means the first release, whose window is 4096; null means none.
        window = config.get_nullable("sliding_window", 4096)
        super().__init__(
            vllm_config,
            rng,
            self_attn=attention_from_config(
                vllm_config, rng, quant_config, f"{prefix}.self_attn", sliding_window=window
            ),
            mlp=mlp_from_config(vllm_config, rng, quant_config, f"{prefix}.mlp"),
        )


class MistralForCausalLM(CausalLM):
    layer_class = MistralDecoderLayer
