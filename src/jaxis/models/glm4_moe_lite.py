"""GLM-4.7 Flash: DeepSeek V3, with the sparse layers listed."""

from __future__ import annotations

from jaxis.errors import ConfigError
from jaxis.layers.scope import LayerScope
from jaxis.models.common.deepseek import DeepseekCausalLM, DeepseekDecoderLayer, deepseek_v3_routing


class Glm4MoeLiteDecoderLayer(DeepseekDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(
            scope,
            routing=deepseek_v3_routing(scope.config),
            is_sparse=_is_sparse(scope),
            use_selection_bias=True,
            interleaved_rope=scope.config.get("rope_interleave", True),
        )


class Glm4MoeLiteForCausalLM(DeepseekCausalLM):
    layer_class = Glm4MoeLiteDecoderLayer


def _is_sparse(scope: LayerScope) -> bool:
    """Whether the layer is sparse by `mlp_layer_types` or, without it, by `first_k_dense_replace`.

    Raises:
      ConfigError: `mlp_layer_types` has an unknown type, or not one entry per layer.
    """
    config, kinds = scope.config, scope.config.get("mlp_layer_types")
    if kinds is None:
        return scope.layer_index >= config.get("first_k_dense_replace", 1)
    config.ignore("first_k_dense_replace", because="mlp_layer_types names each layer's kind")
    if len(kinds) != config["num_hidden_layers"] or not {"dense", "sparse"}.issuperset(kinds):
        raise ConfigError(f"mlp_layer_types={kinds!r} in {config.source} must say 'dense' or 'sparse' of each layer")
    return kinds[scope.layer_index] == "sparse"
