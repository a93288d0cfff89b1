"""Qwen3.5, 3.6 and 3.8: three layers of gated delta networks (arXiv:2412.06464) for each one of gated attention."""

from __future__ import annotations

from jaxis.layers.gated_delta_net import GatedDeltaNet
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.qwen_hybrid import TINY_DELTA_NET, QwenHybridCausalLM, QwenHybridLayer
from jaxis.models.common.text_part import InnerTextPart
from jaxis.models.common.towers.minicpm import MiniCPMVision
from jaxis.models.common.towers.qwen import Qwen3_5Vision


class Qwen3_5DecoderLayer(QwenHybridLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, mlp=GatedMLP(scope / "mlp"), delta_net=GatedDeltaNet)


class Qwen3_5ForCausalLM(QwenHybridCausalLM):
    layer_class = Qwen3_5DecoderLayer


class Qwen3_5ForConditionalGeneration(InnerTextPart, Qwen3_5ForCausalLM):
    tower = Qwen3_5Vision
    text_model_types = ("qwen3_5_text",)


class MiniCPMV4_6ForConditionalGeneration(InnerTextPart, Qwen3_5ForCausalLM):
    """MiniCPM-V 4.6: the text model, with its image encoder; videos are not supported."""

    tower = MiniCPMVision
    text_model_types = ("qwen3_5_text",)
    other_parts = ("model.vision_tower", "model.merger")
    other_keys = (
        *("insert_layer_id", "image_size", "patch_size", "drop_vision_last_layer", "downsample_mode"),
        *("merge_kernel_size", "merger_times"),
    )


FAMILY = Family(
    "Qwen3.5, 3.6, 3.8; MiniCPM-V 4.6",
    (Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, MiniCPMV4_6ForConditionalGeneration),
    "as Qwen3-Next, dense; Qwen's tower, M-RoPE; SigLIP's tower (MiniCPM-V)",
    gguf=("qwen35",),
    tiny=TINY_DELTA_NET,
)
