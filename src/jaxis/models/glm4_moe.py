"""GLM-4.5, 4.6 and 4.7 (MoE): partial rope, dense layers first, then experts chosen by sigmoid with a shared one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from flax import nnx

from jaxis.layers.decoder_layer import PreNormDecoderLayer, attention_from_config, mlp_from_config
from jaxis.layers.module import JaxModule
from jaxis.layers.moe import moe_from_config
from jaxis.layers.routing import Routing
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.prediction_layers import without_prediction_layers

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.quantization.config import QuantizationConfig


class Glm4MoeDecoderLayer(PreNormDecoderLayer):
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
                vllm_config,
                rng,
                quant_config,
                f"{prefix}.self_attn",
                qkv_bias=config.get("attention_bias", False),
                qk_norm=config.get("use_qk_norm", False),
            ),
            mlp=_feed_forward(vllm_config, rng, quant_config, layer_index, f"{prefix}.mlp"),
        )


class Glm4MoeForCausalLM(CausalLM):
    layer_class = Glm4MoeDecoderLayer

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        super().__init__(vllm_config, rng, quant_config)
        self.num_prediction_layers = vllm_config.model_config.hf_config.get("num_nextn_predict_layers", 1)

    def without_redundant_tensors(self, weights: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
        weights = without_prediction_layers(weights, len(self.model.layers), self.num_prediction_layers)
        return super().without_redundant_tensors(weights)


def _feed_forward(
    vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None, layer_index: int, prefix: str
) -> JaxModule:
    config = vllm_config.model_config.hf_config
    dense_size, sparse_size = config["intermediate_size"], config["moe_intermediate_size"]
    routing = Routing(
        num_experts=config["n_routed_experts"],
        num_experts_per_token=config["num_experts_per_tok"],
        score_function="sigmoid",
        renormalize=config.get("norm_topk_prob", True),
        scaling_factor=config.get("routed_scaling_factor", 1.0),
        num_groups=config.get("n_group", 1),
        num_allowed_groups=config.get("topk_group", 1),
        group_score="top2_sum",
        float32_logits=True,
    )
    shared_size = sparse_size * config.get("n_shared_experts", 1)
    if layer_index < config.get("first_k_dense_replace", 1):
        return mlp_from_config(vllm_config, rng, quant_config, prefix, intermediate_size=dense_size)
    shared_experts = None
    if shared_size:
        shared_experts = mlp_from_config(
            vllm_config, rng, quant_config, f"{prefix}.shared_experts", intermediate_size=shared_size
        )
    return moe_from_config(
        vllm_config,
        rng,
        quant_config,
        prefix,
        routing=routing,
        intermediate_size=sparse_size,
        use_selection_bias=True,
        shared_experts=shared_experts,
    )
