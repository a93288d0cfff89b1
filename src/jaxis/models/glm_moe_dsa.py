"""GLM-5 to 5.3: as DeepSeek V3.2; from 5.2 on, most layers use the selection of an earlier layer's indexer."""

from __future__ import annotations

import dataclasses

from jaxis.config.hf_config import HFConfig
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.sparse_latent import TINY_INDEXER, SparseLatentCausalLM, SparseLatentDecoderLayer

_SCHEDULE_KEYS = ("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
_HAS_INDEXER = {"full": True, "shared": False, "F": True, "S": False}


class GlmMoeDsaDecoderLayer(SparseLatentDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(
            scope,
            interleaved_index_rope=scope.config.get("indexer_rope_interleave", True),
            has_indexer=_has_indexer(scope.config),
        )


class GlmMoeDsaPredictionLayer(SparseLatentDecoderLayer):
    """The layer that predicts later tokens, which always has its own indexer."""

    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, interleaved_index_rope=scope.config.get("indexer_rope_interleave", True))


class GlmMoeDsaForCausalLM(SparseLatentCausalLM):
    layer_class = GlmMoeDsaDecoderLayer

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        super().check_config(config)
        config.expect("moe_router_dtype", "float32")
        config.ignore("index_share_for_mtp_iteration", because="the prediction layer selects for each draft anew")

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        options = super().options(scope)
        if options.prediction is None:
            return options
        prediction = dataclasses.replace(options.prediction, layer_class=GlmMoeDsaPredictionLayer)
        return dataclasses.replace(options, prediction=prediction)


def _has_indexer(config: HFConfig) -> list[bool]:
    """Returns for each layer whether it has an indexer: by a list, a pattern of letters, or a period.

    Raises ConfigError if the list or the pattern lacks a layer, or the first layer has no indexer.
    """
    num_layers: int = config["num_hidden_layers"]
    key = "indexer_types" if config.get("indexer_types") is not None else "index_topk_pattern"
    kinds = config.get(key)
    if kinds is None:
        frequency, offset = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
        return [max(i - offset + 1, 0) % max(frequency, 1) == 0 for i in range(num_layers)]
    for other in _SCHEDULE_KEYS:
        config.ignore(other, because=f"{key} says it of each layer")
    found = [_HAS_INDEXER.get(kind) for kind in kinds]
    if len(found) != num_layers or None in found or not found[0]:
        raise config.fault(key, why=f"expected 'full' or 'shared' for each of {num_layers} layers, and 'full' first")
    return [bool(each) for each in found]


FAMILY = Family(
    "GLM-5 to 5.3",
    (GlmMoeDsaForCausalLM,),
    "as DeepSeek V3.2; from 5.2 on, three of four layers use the selection of an earlier one",
    tiny=TINY_INDEXER,
)
