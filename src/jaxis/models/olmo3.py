"""OLMo 3: OLMo 2 with a window over three of four layers, and YaRN on the others only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx

from jaxis.config.layer_types import layer_type, layer_window
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PostNormDecoderLayer, mlp_from_config
from jaxis.models.common.decoder import CausalLM
from jaxis.models.olmo2 import olmo_attention

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class Olmo3DecoderLayer(PostNormDecoderLayer):
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
        kind = layer_type(config, layer_index, full_every=4)
        super().__init__(
            vllm_config,
            rng,
            self_attn=olmo_attention(
                vllm_config,
                rng,
                quant_config,
                f"{prefix}.self_attn",
                rope_settings=rope_config(config, kind, default_theta=500_000.0),
                sliding_window=layer_window(config, kind, default=4096),
            ),
            mlp=mlp_from_config(vllm_config, rng, quant_config, f"{prefix}.mlp"),
        )


class Olmo3ForCausalLM(CausalLM):
    layer_class = Olmo3DecoderLayer
