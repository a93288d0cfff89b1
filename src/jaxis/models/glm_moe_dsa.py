"""GLM-5 to 5.3: as DeepSeek V3.2; from 5.2 on, most layers use the selection of an earlier layer's indexer."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.prediction_layers import PredictionNames
from jaxis.models.common.sparse_latent import (
    TINY_INDEXER,
    SparseLatentCausalLM,
    SparseLatentDecoderLayer,
    layers_with_indexer,
)


class GlmMoeDsaDecoderLayer(SparseLatentDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(
            scope,
            interleaved_index_rope=scope.config.get("indexer_rope_interleave", True),
            has_indexer=layers_with_indexer(scope.config),
        )


class GlmMoeDsaPredictionLayer(SparseLatentDecoderLayer):
    """The layer that predicts later tokens, which always has its own indexer."""

    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, interleaved_index_rope=scope.config.get("indexer_rope_interleave", True))


class GlmMoeDsaForCausalLM(SparseLatentCausalLM):
    layer_class = GlmMoeDsaDecoderLayer
    supported_values = (("moe_router_dtype", "float32"),)
    ignored_keys = (("index_share_for_mtp_iteration", "the prediction layer selects for each draft anew"),)

    @classmethod
    def prediction_names(cls, config: HFConfig) -> PredictionNames | None:
        return PredictionNames.numbered(config, layer_class=GlmMoeDsaPredictionLayer)


FAMILY = Family(
    "GLM-5 to 5.3",
    (GlmMoeDsaForCausalLM,),
    "as DeepSeek V3.2; from 5.2 on, three of four layers use the selection of an earlier one",
    tiny=TINY_INDEXER,
    gguf=("glm-dsa",),
)
