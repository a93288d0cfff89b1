"""GPT-OSS: attention sinks, a window in every other layer, biases everywhere, experts with a clamped gated unit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx

from jaxis.config.layer_types import layer_type, layer_window
from jaxis.errors import ConfigError
from jaxis.layers.decoder_layer import PreNormDecoderLayer, attention_from_config
from jaxis.layers.experts import StackLayout
from jaxis.layers.glu import ClampedGLU
from jaxis.layers.moe import moe_from_config
from jaxis.layers.routing import Routing
from jaxis.models.common.decoder import CausalLM

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig
    from jaxis.quantization.config import QuantizationConfig


class GptOssDecoderLayer(PreNormDecoderLayer):
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
        _check_redundant_keys(config)
        attention_bias = config.get("attention_bias", True)
        window = layer_window(config, layer_type(config, layer_index, full_every=2), default=128)
        super().__init__(
            vllm_config,
            rng,
            self_attn=attention_from_config(
                vllm_config,
                rng,
                quant_config,
                f"{prefix}.self_attn",
                qkv_bias=attention_bias,
                o_bias=attention_bias,
                sliding_window=window,
                use_sinks=True,
            ),
            mlp=moe_from_config(
                vllm_config,
                rng,
                quant_config,
                f"{prefix}.mlp",
                routing=Routing(
                    num_experts=config["num_local_experts"],
                    num_experts_per_token=config["num_experts_per_tok"],
                    renormalize=True,
                ),
                intermediate_size=config["intermediate_size"],
                gated_unit=ClampedGLU(config.get("swiglu_limit", 7.0), config.get("swiglu_alpha", 1.702)),
                use_bias=True,
                stack_layout=StackLayout(transposed=True, interleaved=True),
                router_name="router",
            ),
        )


class GptOssForCausalLM(CausalLM):
    layer_class = GptOssDecoderLayer


def _check_redundant_keys(config: HFConfig) -> None:
    """Keys that the published configs have beside those that the reference reads."""
    rope = config.get("rope_scaling", config.get("rope_parameters", {}))
    for key, expected in (
        ("hidden_act", "silu"),  # the clamped unit's gate is silu's, with an alpha
        ("experts_per_token", config["num_experts_per_tok"]),
        ("initial_context_length", rope.get("original_max_position_embeddings")),
    ):
        if (value := config.get(key, expected)) != expected:
            raise ConfigError(f"{key}={value!r} in {config.source} is not supported: expected {expected!r}")
