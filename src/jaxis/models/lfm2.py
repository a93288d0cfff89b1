"""LFM2 and LFM2.5 (dense): short convolutions, with attention in about every third layer."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.lfm import LfmCausalLM, LfmDecoderLayer, lfm_mlp
from jaxis.models.common.text_part import InnerTextPart
from jaxis.models.common.towers.lfm2 import Lfm2Vision


class Lfm2DecoderLayer(LfmDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, lfm_mlp(scope / "mlp", intermediate_size=_intermediate_size(scope.config)))


class Lfm2ForCausalLM(LfmCausalLM):
    layer_class = Lfm2DecoderLayer


def _intermediate_size(config: HFConfig) -> int:
    """Returns the width of the feed-forward blocks; by default less than in config.json, since they are gated."""
    size: int = config.get("block_ff_dim", config.get("intermediate_size"))
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    multiple: int = config.get("block_multiple_of", 256)
    size = int(config.get("block_ffn_dim_multiplier", 1.0) * (2 * size // 3))
    return -(-size // multiple) * multiple


class Lfm2VlForConditionalGeneration(InnerTextPart, Lfm2ForCausalLM):
    is_tied_outside = True
    tower = Lfm2Vision
    text_model_types = ("lfm2",)
    other_parts = ("model.vision_tower", "model.multi_modal_projector")
    other_keys = (
        *("projector_hidden_act", "projector_hidden_size", "projector_bias", "projector_use_layernorm"),
        "downsample_factor",
    )


FAMILY = Family(
    "LFM2, LFM2.5 (dense); LFM2-VL",
    (Lfm2ForCausalLM, Lfm2VlForConditionalGeneration),
    "short convolutions in place of attention in two of three layers; SigLIP 2's tower",
    gguf=("lfm2",),
    tiny={
        "block_dim": lambda twin: twin["hidden_size"],
        "conv_dim": lambda twin: twin["hidden_size"],
        "conv_dim_out": lambda twin: twin["hidden_size"],
        "block_ff_dim": 96,
    },
)
