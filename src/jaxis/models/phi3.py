"""Phi-3 (arXiv:2404.14219), Phi-3.5 and Phi-4 (dense, text): the Llama layer with packed projections and LongRoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx

from jaxis.config.rope_config import rope_config
from jaxis.errors import ConfigError
from jaxis.layers.decoder_layer import PreNormDecoderLayer, attention_from_config, mlp_from_config
from jaxis.models.common.decoder import CausalLM

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class Phi3DecoderLayer(PreNormDecoderLayer):
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
        rope = rope_config(config)
        # "yarn" was a name of LongRoPE in the family's first release, and means something else now.
        if rope.rope_type not in ("default", "longrope"):
            raise ConfigError(f"{config.source} has the rope type {rope.rope_type!r}, expected 'longrope' or none")
        super().__init__(
            vllm_config,
            rng,
            self_attn=attention_from_config(
                vllm_config,
                rng,
                quant_config,
                f"{prefix}.self_attn",
                rope_settings=rope,
                packed_qkv=True,
                sliding_window=config.get("sliding_window"),
            ),
            mlp=mlp_from_config(vllm_config, rng, quant_config, f"{prefix}.mlp", packed_gate_up=True),
        )


class Phi3ForCausalLM(CausalLM):
    layer_class = Phi3DecoderLayer

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        config = vllm_config.model_config.hf_config
        for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
            config.expect(key, False)
        for key in ("full_attn_mod", "interpolate_factor"):
            config.expect(key, 1)
        super().__init__(vllm_config, rng, quant_config)
