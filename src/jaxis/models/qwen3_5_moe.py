"""Qwen3.5, 3.6 and 3.8 with experts: the layers of Qwen3.5 with a mixture, and a shared expert behind a gate."""

from __future__ import annotations

from jaxis.layers.experts import StackLayout
from jaxis.layers.gated_delta_net import GatedDeltaNet
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.qwen_hybrid import TINY_DELTA_NET, QwenHybridCausalLM, QwenHybridLayer, qwen_hybrid_moe
from jaxis.models.common.text_part import InnerTextPart
from jaxis.models.common.towers.qwen import Qwen3_5Vision


class Qwen3_5MoeDecoderLayer(QwenHybridLayer):
    def __init__(self, scope: LayerScope) -> None:
        mlp = qwen_hybrid_moe(scope, renormalize=True, stack_layout=StackLayout(transposed=False))
        super().__init__(scope, mlp=mlp, delta_net=GatedDeltaNet)


class Qwen3_5MoeForCausalLM(QwenHybridCausalLM):
    layer_class = Qwen3_5MoeDecoderLayer
    router_aux_loss_coef = 0.001
    ignored_keys = (("intermediate_size", "every layer has experts"),)


class Qwen3_5MoeForConditionalGeneration(InnerTextPart, Qwen3_5MoeForCausalLM):
    tower = Qwen3_5Vision
    text_model_types = ("qwen3_5_moe_text",)


FAMILY = Family(
    "Qwen3.5 MoE, 3.6 MoE, 3.8 MoE",
    (Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration),
    "as Qwen3-Next, with 256 experts and more; Qwen's tower, M-RoPE",
    gguf=("qwen35moe",),
    tiny=TINY_DELTA_NET,
)
