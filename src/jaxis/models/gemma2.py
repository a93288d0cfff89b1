"""Gemma 2 (arXiv:2408.00118): norms before and after each block, soft caps, a window over every second layer."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.layers.decoder_layer import SandwichNormDecoderLayer
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.gemma import GemmaCausalLM, gemma2_attention, gemma_mlp


class Gemma2DecoderLayer(SandwichNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        super().__init__(scope, self_attn=gemma2_attention(scope / "self_attn"), mlp=gemma_mlp(scope / "mlp"))


class Gemma2ForCausalLM(GemmaCausalLM):
    layer_class = Gemma2DecoderLayer
    default_logits_soft_cap = 30.0

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        super().check_config(config)
        # The first checkpoints have the window under two names.
        config.expect("sliding_window_size", config.get("sliding_window"))


FAMILY = Family(
    "Gemma 2",
    (Gemma2ForCausalLM,),
    "norms before and after, soft caps, a window in every other layer",
    gguf=("gemma2",),
)
