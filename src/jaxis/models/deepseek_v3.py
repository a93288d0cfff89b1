"""DeepSeek V3 and R1, and Kimi K2: as DeepSeek V2, with experts chosen by sigmoid scores and a selection bias."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from flax import nnx

from jaxis.layers.routing import Routing
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.prediction_layers import without_prediction_layers
from jaxis.models.deepseek_v2 import DeepseekDecoderLayer, require_value

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig
    from jaxis.quantization.config import QuantizationConfig


def deepseek_v3_routing(config: HFConfig) -> Routing:
    """Sigmoid scores, biased for the choice only; the best experts of the best groups.

    Raises:
      ConfigError: config.json asks for another way.
    """
    require_value(config, "scoring_func", "sigmoid")
    require_value(config, "topk_method", "noaux_tc")
    return Routing(
        num_experts=config["n_routed_experts"],
        num_experts_per_token=config["num_experts_per_tok"],
        score_function="sigmoid",
        renormalize=config["norm_topk_prob"],
        scaling_factor=config["routed_scaling_factor"],
        num_groups=config["n_group"],
        num_allowed_groups=config["topk_group"],
        group_score="top2_sum",
        float32_logits=True,
    )


class DeepseekV3DecoderLayer(DeepseekDecoderLayer):
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
        require_value(config, "moe_layer_freq", 1)
        super().__init__(
            vllm_config,
            rng,
            quant_config,
            prefix=prefix,
            routing=deepseek_v3_routing(config),
            use_selection_bias=True,
            is_sparse=layer_index >= config["first_k_dense_replace"],
            interleaved_rope=config.get("rope_interleave", True),
        )


class DeepseekV3ForCausalLM(CausalLM):
    layer_class = DeepseekV3DecoderLayer

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        super().__init__(vllm_config, rng, quant_config)
        self.num_prediction_layers = vllm_config.model_config.hf_config.get("num_nextn_predict_layers", 0)

    def without_redundant_tensors(self, weights: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
        weights = without_prediction_layers(weights, len(self.model.layers), self.num_prediction_layers)
        return super().without_redundant_tensors(weights)
