"""Qwen2 and MiMo 7B: the Llama layer with biases on queries, keys and values, and an optional sliding window."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.prediction_layers import PredictionNames
from jaxis.models.common.qwen import Qwen2DecoderLayer
from jaxis.models.common.text_part import TextPart
from jaxis.models.common.towers.qwen import Qwen2_5VLVision, Qwen2VLVision


class Qwen2ForCausalLM(CausalLM):
    layer_class = Qwen2DecoderLayer
    ignored_keys = (
        (("attention_bias", "qkv_bias"), "there are always biases: a checkpoint without them lacks tensors"),
    )


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with a layer that predicts later tokens."""

    prediction_modules = ("model.mtp_layers.",)

    @classmethod
    def prediction_names(cls, config: HFConfig) -> PredictionNames | None:
        del config
        return PredictionNames(
            module="model.mtp_layers.0",
            embedding_norm="token_layernorm",
            hidden_norm="hidden_layernorm",
            projection="input_proj",
            norm="final_layernorm",
            layer="",
            layer_index=0,
            hidden_first=True,
        )


class Qwen2_5_VLForConditionalGeneration(TextPart, Qwen2ForCausalLM):
    """Qwen2.5-VL: the text model with Qwen2's names, sometimes without `text_config`, and its image encoder."""

    tower = Qwen2_5VLVision
    text_renames = ()
    text_model_types = ("qwen2_5_vl_text", "qwen2_5_vl")
    other_parts = ("visual",)


class Qwen2VLForConditionalGeneration(Qwen2_5_VLForConditionalGeneration):
    tower = Qwen2VLVision
    text_model_types = ("qwen2_vl_text", "qwen2_vl")


FAMILY = Family(
    "Qwen2, Qwen2.5; Qwen2-VL, Qwen2.5-VL",
    (Qwen2ForCausalLM, Qwen2VLForConditionalGeneration, Qwen2_5_VLForConditionalGeneration),
    "biases on queries, keys and values; optional window layers; Qwen's tower, M-RoPE",
    gguf=("qwen2", "qwen2vl"),
)

MIMO_FAMILY = Family(
    "MiMo 7B",
    (MiMoForCausalLM,),
    "Qwen2, and a layer that predicts later tokens",
    same_code={"mimo": "qwen2", "MiMoForCausalLM": "Qwen2ForCausalLM"},
)
