"""Qwen3 (dense) and the text of Qwen3-VL: the Llama layer with a norm on each query and key head."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.qwen import qwen_layer_span
from jaxis.models.common.text_part import InnerTextPart


class Qwen3DecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        use_bias = scope.config.get("attention_bias", False)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=128,
                qk_norm=True,
                qkv_bias=use_bias,
                o_bias=use_bias,
                span=qwen_layer_span(scope),
            ),
            mlp=GatedMLP(scope / "mlp"),
        )


class Qwen3ForCausalLM(CausalLM):
    layer_class = Qwen3DecoderLayer

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect("use_qk_norm", True)


class Qwen3VLForConditionalGeneration(InnerTextPart, Qwen3ForCausalLM):
    """Checkpoints that see; images are not supported."""

    text_model_types = ("qwen3_vl_text",)
    other_parts = ("model.visual",)
    other_keys = ("vision_config",)


class LightOnOcrForConditionalGeneration(InnerTextPart, Qwen3ForCausalLM):
    """LightOnOCR; images are not supported."""

    text_model_types = ("qwen3",)
    other_parts = ("model.vision_encoder", "model.vision_projection")
    other_keys = ("vision_config", "spatial_merge_size")


FAMILY = Family(
    "Qwen3; Qwen3-VL, LightOnOCR (text)",
    (Qwen3ForCausalLM, Qwen3VLForConditionalGeneration, LightOnOcrForConditionalGeneration),
    "a norm on each query and key head",
    gguf=("qwen3",),
)
