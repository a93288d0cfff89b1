"""Command R7B and Command A (Cohere 2): window and rope in three of four layers, neither in the fourth."""

from __future__ import annotations

from typing import ClassVar

from jaxis.config.layer_types import SLIDING_ATTENTION, layer_span, layer_type
from jaxis.layers.decoder_layer import ParallelDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.cohere import Cohere2CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.text_part import InnerTextPart, TextPart
from jaxis.models.common.towers.cohere import AyaVision, Cohere2Vision
from jaxis.models.common.towers.tower import VisionTower


class Cohere2DecoderLayer(ParallelDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        kind = layer_type(config, scope.layer_index, full_every=4)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                use_rope=kind == SLIDING_ATTENTION,
                interleaved_rope=True,
                use_bias=config.get("attention_bias", False),
                span=layer_span(config, kind, default_window=4096),
            ),
            mlp=GatedMLP(scope / "mlp"),
        )


class Cohere2ForCausalLM(Cohere2CausalLM):
    layer_class = Cohere2DecoderLayer


class AyaVisionForConditionalGeneration(TextPart, Cohere2ForCausalLM):
    is_tied_outside = True
    tower: ClassVar[type[VisionTower] | None] = AyaVision
    text_model_types = ("cohere2",)
    other_parts = ("vision_tower", "multi_modal_projector")
    other_keys = (
        *("vision_feature_select_strategy", "vision_feature_layer", "downsample_factor", "adapter_layer_norm_eps"),
        "alignment_intermediate_size",
    )


class Cohere2VisionForConditionalGeneration(InnerTextPart, Cohere2ForCausalLM):
    is_tied_outside = True
    tower: ClassVar[type[VisionTower] | None] = Cohere2Vision
    text_model_types = ("cohere2",)
    other_parts = ("model.vision_tower", "model.multi_modal_projector")
    other_keys = ("downsample_factor", "alignment_intermediate_size")


FAMILY = Family(
    "Command R7B, Command A, Aya Vision, Command A Vision",
    (Cohere2ForCausalLM, AyaVisionForConditionalGeneration, Cohere2VisionForConditionalGeneration),
    "as Command R, with a window and RoPE in three of four layers and neither in the fourth",
    gguf=("cohere2",),
)
