"""MiMo 7B: Qwen2, and a layer that predicts later tokens."""

from __future__ import annotations

from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import DecoderOptions
from jaxis.models.common.prediction_layers import PredictionNames
from jaxis.models.qwen2 import Qwen2ForCausalLM

_PREDICTION = PredictionNames(
    module="model.mtp_layers.0",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    norm="final_layernorm",
    layer="",
    layer_index=0,
    hidden_first=True,
)


class MiMoForCausalLM(Qwen2ForCausalLM):
    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        predicts = scope.config.get("num_nextn_predict_layers", 0) > 0
        return DecoderOptions(prediction_modules=("model.mtp_layers.",), prediction=_PREDICTION if predicts else None)
