"""OLMo 2 (arXiv:2501.00656): norms after attention and MLP, and over all query heads and all key heads together."""

from __future__ import annotations

from jaxis.layers.decoder_layer import PostNormDecoderLayer
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.olmo import olmo_attention


class Olmo2DecoderLayer(PostNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, self_attn=olmo_attention(scope / "self_attn"), mlp=GatedMLP(scope / "mlp"))


class Olmo2ForCausalLM(CausalLM):
    layer_class = Olmo2DecoderLayer


FAMILY = Family(
    "OLMo 2", (Olmo2ForCausalLM,), "norms after attention and feed-forward, on all heads together", gguf=("olmo2",)
)
