"""ERNIE 4.5 (dense): the Llama layer with a rope that pairs neighbours; and PaddleOCR-VL, whose rope pairs halves."""

from __future__ import annotations

import functools
from typing import ClassVar

from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family, PlainGGUF
from jaxis.models.common.text_part import TextPart
from jaxis.models.common.towers.paddleocr import PaddleOcrVision
from jaxis.models.common.towers.tower import VisionTower


class Ernie4_5DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope, *, interleaved_rope: bool = True) -> None:
        use_bias = scope.config.get("use_bias", False)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=128,
                rope_settings=rope_config(scope.config, default_theta=500_000.0),
                interleaved_rope=interleaved_rope,
                use_bias=use_bias,
            ),
            mlp=GatedMLP(scope / "mlp", use_bias=use_bias),
        )


class Ernie4_5ForCausalLM(CausalLM):
    layer_class = Ernie4_5DecoderLayer
    tied_by_default = True


class PaddleOCRVLForConditionalGeneration(TextPart, Ernie4_5ForCausalLM):
    """PaddleOCR-VL: the text model with Llama's names, sometimes without `text_config`, and its image encoder."""

    is_tied_outside = True
    tower: ClassVar[type[VisionTower] | None] = PaddleOcrVision
    layer_class = functools.partial(Ernie4_5DecoderLayer, interleaved_rope=False)
    text_renames = ()
    text_model_types = ("paddleocr_vl_text", "paddleocr_vl")
    other_parts = ("visual", "mlp_AR", "projector")
    supported_values = (("rope_is_neox_style", True), ("compression_ratio", 1.0))
    ignored_keys = (
        ("use_3d_rope", "rope_scaling says how rows and columns are counted"),
        ("weight_share_add_bias", "it is about training"),
    )


FAMILY = Family(
    "ERNIE 4.5 (dense); PaddleOCR-VL",
    (Ernie4_5ForCausalLM, PaddleOCRVLForConditionalGeneration),
    "interleaved RoPE; PaddleOCR-VL: RoPE of halves, M-RoPE, and SigLIP's tower",
    gguf=(PlainGGUF("ernie4_5", switches={"use_bias": ["attn_output.bias"]}, theta=500_000.0),),
    other_names={"Ernie4_5_ForCausalLM": Ernie4_5ForCausalLM},
)
