"""Granite 3 MoE: Granite's layer with a mixture of experts, each projection of which is one tensor."""

from __future__ import annotations

from typing import ClassVar

from jaxis.config.hf_config import HFConfig
from jaxis.layers.scope import LayerScope
from jaxis.models.common.granite import GRANITE_EXPERT_NAMES, GraniteBaseDecoderLayer, GraniteCausalLM, granite_moe


class GraniteMoeDecoderLayer(GraniteBaseDecoderLayer):
    feed_forward_name = "block_sparse_moe"

    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, granite_moe(scope / "block_sparse_moe"))


class GraniteMoeForCausalLM(GraniteCausalLM):
    layer_class = GraniteMoeDecoderLayer
    tensor_names: ClassVar = GRANITE_EXPERT_NAMES

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect("norm_topk_prob", True)
