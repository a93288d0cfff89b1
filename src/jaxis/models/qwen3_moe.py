"""Qwen3 MoE and Qwen3-VL MoE: Qwen3 with a mixture of experts in place of most feed-forward blocks."""

from __future__ import annotations

import functools

from jaxis.config.layer_types import uniform_span
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.experts import StackLayout
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.qwen import QWEN3_VL_MROPE, qwen_feed_forward
from jaxis.models.common.text_part import InnerTextPart
from jaxis.models.common.towers.qwen import Qwen3VLVision


class Qwen3MoeDecoderLayer(PreNormDecoderLayer):
    """A decoder layer; `stack_layout` is as in `JaxExperts`, and `mrope` as in `Qwen3DecoderLayer`."""

    def __init__(
        self, scope: LayerScope, *, stack_layout: StackLayout | None = None, mrope: tuple[int, ...] | None = None
    ) -> None:
        config = scope.config
        window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                rope_settings=rope_config(config, default_interleaved_mrope=mrope),
                qk_norm=True,
                use_bias=config.get("attention_bias", False),
                span=uniform_span(config, window),
            ),
            mlp=qwen_feed_forward(scope, renormalize=config.get("norm_topk_prob", False), stack_layout=stack_layout),
        )


class Qwen3MoeForCausalLM(CausalLM):
    layer_class = Qwen3MoeDecoderLayer
    router_aux_loss_coef = 0.001
    supported_values = (("use_qk_norm", True),)
    ignored_keys = (
        ("max_window_layers", "the reference has the window in all layers or in none"),
        ("sliding_window", "only use_sliding_window turns it on"),
        ("intermediate_size", "sparse layers do not have it"),
        ("moe_intermediate_size", "dense layers do not have it"),
    )


class Qwen3VLMoeForConditionalGeneration(InnerTextPart, Qwen3MoeForCausalLM):
    tower = Qwen3VLVision
    layer_class = functools.partial(
        Qwen3MoeDecoderLayer, stack_layout=StackLayout(transposed=None), mrope=QWEN3_VL_MROPE
    )
    text_model_types = ("qwen3_vl_moe_text",)
    supported_values = (("norm_topk_prob", True), *Qwen3MoeForCausalLM.supported_values)


FAMILY = Family(
    "Qwen3 MoE; Qwen3-VL MoE",
    (Qwen3MoeForCausalLM, Qwen3VLMoeForConditionalGeneration),
    "128 experts, 8 per token, renormalized; Qwen's tower, M-RoPE, DeepStack",
    gguf=("qwen3moe", "qwen3vlmoe"),
    defaults={"qwen3_vl_moe_text": {"rope_theta": 500_000.0, "norm_topk_prob": True}},
)
