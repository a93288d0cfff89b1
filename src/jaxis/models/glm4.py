"""GLM-4-0414 (dense): norms before and after each block, a rope that pairs neighbours of half a head."""

from __future__ import annotations

import functools

from jaxis.config.rope_config import rope_config
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.glm import GlmSandwichDecoderLayer
from jaxis.models.common.text_part import InnerTextPart
from jaxis.models.common.towers.glm import GlmOcrVision, GlmVision


class Glm4DecoderLayer(GlmSandwichDecoderLayer):
    """A decoder layer; `default_head_dim` D is E / H by default, and `default_bias` is for queries, keys and values."""

    def __init__(self, scope: LayerScope, *, default_head_dim: int | None = 128, default_bias: bool = True) -> None:
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=default_head_dim,
                rope_settings=rope_config(scope.config, default_partial_rotary_factor=0.5),
                interleaved_rope=True,
                qkv_bias=scope.config.get("attention_bias", default_bias),
            ),
            mlp=GatedMLP(scope / "mlp", packed_gate_up=True),
        )


class Glm4ForCausalLM(CausalLM):
    layer_class = Glm4DecoderLayer


class Glm4vForConditionalGeneration(InnerTextPart, Glm4ForCausalLM):
    """GLM-4.1V Thinking and GLM-4.6V Flash: the text model, with its image encoder."""

    tower = GlmVision
    layer_class = functools.partial(Glm4DecoderLayer, default_head_dim=None)
    text_model_types = ("glm4v_text",)


class Glm46VForConditionalGeneration(Glm4vForConditionalGeneration):
    """GLM-4.6V under another name."""


class GlmOcrForConditionalGeneration(Glm4vForConditionalGeneration):
    tower = GlmOcrVision
    layer_class = functools.partial(Glm4DecoderLayer, default_bias=False)
    text_model_types = ("glm_ocr_text",)


FAMILY = Family(
    "GLM-4 (0414); GLM-4.1V, GLM-4.6V Flash, GLM-OCR",
    (Glm4ForCausalLM, Glm4vForConditionalGeneration, Glm46VForConditionalGeneration, GlmOcrForConditionalGeneration),
    "norms before and after, interleaved partial RoPE, packed gate and up projections; a tower of its own, M-RoPE",
    gguf=("glm4",),
)
