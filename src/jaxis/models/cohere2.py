"""Command R7B and Command A (Cohere 2): Cohere with window and rope in three of four layers, neither in the fourth."""

from __future__ import annotations

from jaxis.config.layer_types import SLIDING_ATTENTION, layer_span, layer_type
from jaxis.layers.decoder_layer import ParallelDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.cohere import Cohere2CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.layer_norms import unbiased_layer_norm
from jaxis.models.common.text_part import TextPart


class Cohere2DecoderLayer(ParallelDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        kind = layer_type(config, scope.layer_index, full_every=4)
        use_bias = config.get("attention_bias", False)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                use_rope=kind == SLIDING_ATTENTION,
                interleaved_rope=True,
                qkv_bias=use_bias,
                o_bias=use_bias,
                span=layer_span(config, kind, default_window=4096),
            ),
            mlp=GatedMLP(scope / "mlp"),
            make_norm=unbiased_layer_norm,
        )


class Cohere2ForCausalLM(Cohere2CausalLM):
    layer_class = Cohere2DecoderLayer


class AyaVisionForConditionalGeneration(TextPart, Cohere2ForCausalLM):
    """Aya Vision; images are not supported."""

    text_model_types = ("cohere2",)
    other_parts = ("vision_tower", "multi_modal_projector")
    other_keys = (
        *("vision_config", "vision_feature_select_strategy", "vision_feature_layer", "image_token_index"),
        *("downsample_factor", "adapter_layer_norm_eps", "alignment_intermediate_size"),
    )


class Cohere2VisionForConditionalGeneration(AyaVisionForConditionalGeneration):
    """Command A Vision, whose checkpoints name the text model's modules as those of a text model alone; images are not
    supported."""


FAMILY = Family(
    "Command R7B, Command A; Aya Vision, Command A Vision (text)",
    (Cohere2ForCausalLM, AyaVisionForConditionalGeneration, Cohere2VisionForConditionalGeneration),
    "as Command R, with a window and RoPE in three of four layers and neither in the fourth",
    gguf=("cohere2",),
)
