"""DeepSeek V3 and R1, and Kimi K2 to K2.7: as DeepSeek V2, with sigmoid scores and a selection bias of experts."""

from __future__ import annotations

from jaxis.layers.scope import LayerScope
from jaxis.models.common.deepseek import DeepseekCausalLM, DeepseekDecoderLayer, deepseek_v3_routing
from jaxis.models.common.family import Family
from jaxis.models.common.sparse_layers import num_dense_layers
from jaxis.models.common.text_part import TextPart
from jaxis.models.common.towers.kimi import KimiVision


class DeepseekV3DecoderLayer(DeepseekDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        super().__init__(
            scope,
            routing=deepseek_v3_routing(config),
            is_sparse=scope.layer_index >= num_dense_layers(config),
            use_selection_bias=True,
            interleaved_rope=config.get("rope_interleave", True),
        )


class DeepseekV3ForCausalLM(DeepseekCausalLM):
    layer_class = DeepseekV3DecoderLayer
    supported_values = (("moe_layer_freq", 1),)


class Kimi_K25ForConditionalGeneration(TextPart, DeepseekV3ForCausalLM):
    """Kimi K2.5, K2.6 and K2.7: the text model, with its image encoder; videos are not supported."""

    is_tied_outside = True
    tower = KimiVision
    text_model_types = ("kimi_k2", "deepseek_v3")
    other_parts = ("vision_tower", "mm_projector")
    other_keys = (
        *("ignore_index", "video_placeholder", "use_unified_vision_chunk", "projection_hidden_size"),
        "projection_layer_norm_eps",
    )


FAMILY = Family(
    "DeepSeek V3, R1; Kimi K2 to K2.7",
    (DeepseekV3ForCausalLM, Kimi_K25ForConditionalGeneration),
    "latent attention; experts in groups, sigmoid, selection bias; MoonViT from Kimi K2.5 on",
    formats=("fp8", "int4 (Kimi)"),
    gguf=("deepseek2",),
    same_code={"kimi_k2": "deepseek_v3"},
    other_names={"KimiK25ForConditionalGeneration": Kimi_K25ForConditionalGeneration},
)
