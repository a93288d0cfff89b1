"""ERNIE 4.5 (dense): the Llama layer with a rope that pairs neighbours; and the text of PaddleOCR-VL, whose rope pairs
halves."""

from __future__ import annotations

import functools

from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.text_part import TextPart


class Ernie4_5DecoderLayer(PreNormDecoderLayer):
    """The layer; `interleaved_rope`: see `GroupedQueryAttention`."""

    def __init__(self, scope: LayerScope, *, interleaved_rope: bool = True) -> None:
        use_bias = scope.config.get("use_bias", False)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=128,
                rope_settings=rope_config(scope.config, default_theta=500_000.0),
                interleaved_rope=interleaved_rope,
                qkv_bias=use_bias,
                o_bias=use_bias,
            ),
            mlp=GatedMLP(scope / "mlp", use_bias=use_bias),
        )


class Ernie4_5ForCausalLM(CausalLM):
    layer_class = Ernie4_5DecoderLayer

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        del scope
        return DecoderOptions(tied_by_default=True)


class PaddleOCRVLForConditionalGeneration(TextPart, Ernie4_5ForCausalLM):
    """PaddleOCR-VL; images are not supported. Its text has Llama's names, and its keys may have no object."""

    layer_class = functools.partial(Ernie4_5DecoderLayer, interleaved_rope=False)
    text_renames = ()
    text_model_types = ("paddleocr_vl_text", "paddleocr_vl")
    other_parts = ("visual", "mlp_AR")
    other_keys = ("vision_config",)


FAMILY = Family(
    "ERNIE 4.5 (dense); PaddleOCR-VL (text)",
    (Ernie4_5ForCausalLM, PaddleOCRVLForConditionalGeneration),
    "interleaved RoPE; PaddleOCR-VL: RoPE of halves",
    gguf=("ernie4_5",),
    other_names={"Ernie4_5_ForCausalLM": Ernie4_5ForCausalLM},
)
