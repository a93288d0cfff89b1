"""DeepSeek V3 and R1, and Kimi K2: as DeepSeek V2, with experts chosen by sigmoid scores and a selection bias."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from flax import nnx

from jaxis.layers.decoder_layer import PreNormDecoderLayer, mlp_from_config
from jaxis.layers.moe import SparseMoE, moe_from_config
from jaxis.layers.routing import Routing
from jaxis.models.decoder import CausalLM
from jaxis.models.deepseek_v2 import is_sparse, latent_attention_from_config, require_value

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.hf_config import HFConfig
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


def deepseek_v3_moe(
    vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None, prefix: str
) -> SparseMoE:
    """The sparse block of a layer: routed experts, and shared ones that are one wide block."""
    config = vllm_config.model_config.hf_config
    expert_size = config["moe_intermediate_size"]
    return moe_from_config(
        vllm_config,
        rng,
        quant_config,
        prefix,
        routing=deepseek_v3_routing(config),
        intermediate_size=expert_size,
        use_selection_bias=True,
        shared_experts=mlp_from_config(
            vllm_config,
            rng,
            quant_config,
            f"{prefix}.shared_experts",
            intermediate_size=expert_size * config["n_shared_experts"],
        ),
    )


class DeepseekV3DecoderLayer(PreNormDecoderLayer):
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
        mlp = deepseek_v3_moe if is_sparse(config, layer_index) else mlp_from_config
        super().__init__(
            vllm_config,
            rng,
            self_attn=latent_attention_from_config(
                vllm_config,
                rng,
                quant_config,
                f"{prefix}.self_attn",
                interleaved_rope=config.get("rope_interleave", True),
            ),
            mlp=mlp(vllm_config, rng, quant_config, f"{prefix}.mlp"),
        )


class DeepseekV3ForCausalLM(CausalLM):
    """The decoder alone: layers of the checkpoint that predict further tokens at once (multi-token prediction) stand
    after the last decoder layer, change none of its logits, and are left out."""

    layer_class = DeepseekV3DecoderLayer

    def __init__(self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None) -> None:
        super().__init__(vllm_config, rng, quant_config)
        config = vllm_config.model_config.hf_config
        first = config["num_hidden_layers"]
        self.multi_token_layers = range(first, first + config.get("num_nextn_predict_layers", 0))

    def without_redundant_tensors(self, weights: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
        """As `CausalLM`'s; drops the multi-token prediction layers too."""
        for name, tensor in super().without_redundant_tensors(weights):
            match = re.match(r"model\.layers\.(\d+)\.", name)
            if match is None or int(match[1]) not in self.multi_token_layers:
                yield name, tensor
