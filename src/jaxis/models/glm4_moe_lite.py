"""GLM-4.7 Flash: DeepSeek V3, with the sparse layers listed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx

from jaxis.errors import ConfigError
from jaxis.models.deepseek_v2 import DeepseekDecoderLayer
from jaxis.models.deepseek_v3 import DeepseekV3ForCausalLM, deepseek_v3_routing

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig
    from jaxis.quantization.config import QuantizationConfig


def is_sparse_layer(config: HFConfig, layer_index: int) -> bool:
    """As `mlp_layer_types` says; without it, in all layers from `first_k_dense_replace` on.

    Raises:
      ConfigError: It names another kind of layer, or not every layer's.
    """
    first_sparse, kinds = config.get("first_k_dense_replace", 1), config.get("mlp_layer_types")
    if kinds is None:
        return layer_index >= first_sparse
    if len(kinds) != config["num_hidden_layers"] or not {"dense", "sparse"}.issuperset(kinds):
        raise ConfigError(f"mlp_layer_types={kinds!r} in {config.source} must say 'dense' or 'sparse' of each layer")
    return kinds[layer_index] == "sparse"


class Glm4MoeLiteDecoderLayer(DeepseekDecoderLayer):
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
            quant_config,
            prefix=prefix,
            routing=deepseek_v3_routing(config),
            use_selection_bias=True,
            is_sparse=is_sparse_layer(config, layer_index),
            interleaved_rope=config.get("rope_interleave", True),
        )


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    layer_class = Glm4MoeLiteDecoderLayer
