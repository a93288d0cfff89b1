"""EXAONE 4: norms after attention and feed-forward, norms on heads, and a window and a rope in three of four layers."""

from __future__ import annotations

from typing import ClassVar

from jaxis.config.attention_span import AttentionSpan
from jaxis.config.layer_types import SLIDING_ATTENTION, layer_span, layer_type, uniform_span
from jaxis.layers.decoder_layer import PostNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.text_part import InnerTextPart
from jaxis.models.common.towers.qwen import Exaone4_5Vision
from jaxis.models.common.towers.tower import VisionTower


class Exaone4DecoderLayer(PostNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        span, has_rope = _span_and_rope(scope)
        attention = GroupedQueryAttention(scope / "self_attn", use_rope=has_rope, qk_norm=True, span=span)
        super().__init__(scope, self_attn=attention, mlp=GatedMLP(scope / "mlp"))


class Exaone4ForCausalLM(CausalLM):
    layer_class = Exaone4DecoderLayer


def _span_and_rope(scope: LayerScope) -> tuple[AttentionSpan, bool]:
    """Returns the tokens that the layer sees, and whether it has a rope: all layers, or those with a window."""
    config = scope.config
    if config.get("sliding_window", 4096) is None:
        config.ignore("sliding_window_pattern", because="there are no windows")
        return uniform_span(config, None), True
    kind = layer_type(config, scope.layer_index, full_every=4)
    return layer_span(config, kind, default_window=4096), kind == SLIDING_ATTENTION


class Exaone4_5_ForConditionalGeneration(InnerTextPart, Exaone4ForCausalLM):
    tower: ClassVar[type[VisionTower] | None] = Exaone4_5Vision
    text_model_types = ("exaone4", "exaone4_5_text")


FAMILY = Family(
    "EXAONE 4 and 4.5",
    (Exaone4ForCausalLM, Exaone4_5_ForConditionalGeneration),
    "norms after attention and feed-forward, and on heads; a window and RoPE in three of four layers and "
    "neither in the fourth, or RoPE everywhere",
    gguf=("exaone4",),
)
