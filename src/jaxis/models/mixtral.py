"""Mixtral: the Mistral layer with a mixture of experts in place of the feed-forward block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx

from jaxis.layers.decoder_layer import PreNormDecoderLayer, attention_from_config
from jaxis.layers.moe import moe_from_config
from jaxis.layers.routing import Routing
from jaxis.models.common.decoder import CausalLM

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class MixtralDecoderLayer(PreNormDecoderLayer):
    feed_forward_name = "block_sparse_moe"

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
        super().__init__(
            vllm_config,
            rng,
            self_attn=attention_from_config(
                vllm_config, rng, quant_config, f"{prefix}.self_attn", sliding_window=config.get("sliding_window")
            ),
            mlp=moe_from_config(
                vllm_config,
                rng,
                quant_config,
                f"{prefix}.block_sparse_moe",
                routing=Routing(
                    num_experts=config["num_local_experts"],
                    num_experts_per_token=config["num_experts_per_tok"],
                    renormalize=True,
                ),
                intermediate_size=config["intermediate_size"],
            ),
        )


class MixtralForCausalLM(CausalLM):
    layer_class = MixtralDecoderLayer
