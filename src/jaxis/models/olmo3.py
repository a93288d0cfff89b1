"""OLMo 3: OLMo 2 with a window in three of four layers, and YaRN only in the others."""

from __future__ import annotations

from jaxis.config.layer_types import layer_span, layer_type
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PostNormDecoderLayer
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.olmo import olmo_attention


class Olmo3DecoderLayer(PostNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        kind = layer_type(scope.config, scope.layer_index, full_every=4)
        super().__init__(
            scope,
            self_attn=olmo_attention(
                scope / "self_attn",
                rope_settings=rope_config(scope.config, kind, default_theta=500_000.0),
                span=layer_span(scope.config, kind, default_window=4096),
            ),
            mlp=GatedMLP(scope / "mlp"),
        )


class Olmo3ForCausalLM(CausalLM):
    layer_class = Olmo3DecoderLayer


FAMILY = Family(
    "OLMo 3", (Olmo3ForCausalLM,), "as OLMo 2, with a window in three of four layers and YaRN in the fourth"
)
