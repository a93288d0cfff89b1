"""Qwen3 MoE: the Qwen3 layer with a mixture of experts in place of most feed-forward blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx

from jaxis.layers.decoder_layer import PreNormDecoderLayer, attention_from_config, mlp_from_config
from jaxis.layers.module import JaxModule
from jaxis.layers.moe import moe_from_config
from jaxis.layers.routing import Routing
from jaxis.models.common.decoder import CausalLM

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig
    from jaxis.quantization.config import QuantizationConfig


class Qwen3MoeDecoderLayer(PreNormDecoderLayer):
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
        window = config.get("sliding_window", 4096)
        # Qwen2's; here the reference has the window in all layers or in none.
        config.get("max_window_layers")
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
                qk_norm=True,
                sliding_window=window if config.get("use_sliding_window", False) else None,
            ),
            mlp=_feed_forward(vllm_config, rng, quant_config, layer_index, f"{prefix}.mlp"),
        )


class Qwen3MoeForCausalLM(CausalLM):
    layer_class = Qwen3MoeDecoderLayer


def _feed_forward(
    vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None, layer_index: int, prefix: str
) -> JaxModule:
    config = vllm_config.model_config.hf_config
    dense_size, sparse_size = config["intermediate_size"], config["moe_intermediate_size"]
    routing = Routing(
        num_experts=_num_experts(config),
        num_experts_per_token=config["num_experts_per_tok"],
        renormalize=config.get("norm_topk_prob", False),
    )
    is_dense = layer_index in config.get("mlp_only_layers", [])
    if is_dense or (layer_index + 1) % config.get("decoder_sparse_step", 1):
        return mlp_from_config(vllm_config, rng, quant_config, prefix, intermediate_size=dense_size)
    return moe_from_config(vllm_config, rng, quant_config, prefix, routing=routing, intermediate_size=sparse_size)


def _num_experts(config: HFConfig) -> int:
    # transformers 5 writes the second.
    return config["num_experts"] if "num_experts" in config else config["num_local_experts"]
