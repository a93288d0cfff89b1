"""Granite 3 MoE: Granite's layer with a mixture of experts, each projection of which is one tensor."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.granite import GRANITE_MOE_RENAMES, GraniteBaseDecoderLayer, GraniteCausalLM, granite_moe


class GraniteMoeDecoderLayer(GraniteBaseDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, granite_moe(scope / "mlp"))


class GraniteMoeForCausalLM(GraniteCausalLM):
    layer_class = GraniteMoeDecoderLayer
    renames = GRANITE_MOE_RENAMES

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect("norm_topk_prob", True)


FAMILY = Family(
    "Granite 3 MoE", (GraniteMoeForCausalLM,), "as Granite 3, with experts stored in one tensor a projection"
)
