"""LFM3: short convolutions, attention with windows or without, gated heads, and norms before and after each block."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import CONVOLUTION, FULL_ATTENTION, SLIDING_ATTENTION, layer_span, listed_layer_type
from jaxis.config.rope_config import rope_config
from jaxis.errors import ConfigError
from jaxis.layers.decoder_layer import SandwichNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.output_gate import OutputGate
from jaxis.layers.scope import LayerScope
from jaxis.layers.short_conv import ShortConv
from jaxis.models.common.family import Family
from jaxis.models.common.lfm import LfmCausalLM, lfm_mlp, lfm_norm
from jaxis.models.common.text_part import InnerTextPart
from jaxis.models.common.towers.lfm3 import Lfm3Vision

_PERIOD = (SLIDING_ATTENTION, CONVOLUTION, FULL_ATTENTION, CONVOLUTION)


class Lfm3DecoderLayer(SandwichNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config, index = scope.config, scope.layer_index
        kind = listed_layer_type(config, index, CONVOLUTION, FULL_ATTENTION, SLIDING_ATTENTION)
        if kind is None:
            kind = _PERIOD[index % 4] if index else CONVOLUTION
        if kind == CONVOLUTION:
            use_bias = config.get("conv_bias", False)
            name, mixer = "conv", ShortConv(scope / "conv", default_width=7, use_bias=use_bias)
        else:
            name, mixer = "self_attn", _attention(scope / "self_attn", kind)
        super().__init__(scope, self_attn=mixer, mlp=lfm_mlp(scope / "mlp"), mixer_name=name)


class Lfm3ForCausalLM(LfmCausalLM):
    layer_class = Lfm3DecoderLayer
    renames = (
        ("model.embedding_norm", "model.norm"),
        ("operator_norm", "input_layernorm"),
        ("post_operator_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("post_ffn_norm", "post_feedforward_layernorm"),
        ("self_attn.gate_proj", "self_attn.g_proj"),
        ("feed_forward", "mlp"),
        ("mlp.w1", "mlp.gate_proj"),
        ("mlp.w3", "mlp.up_proj"),
        ("mlp.w2", "mlp.down_proj"),
    )

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        super().check_config(config)
        config.expect("use_sandwich_norm", True)
        config.ignore("sliding_window", because="only layers with a window use it")
        if "rope_parameters" not in config:
            raise ConfigError(
                f"{config.source} has no rope_parameters, which say how layers of either kind of attention rotate: "
                "write it with transformers' save_pretrained"
            )


class Lfm3VlForConditionalGeneration(InnerTextPart, Lfm3ForCausalLM):
    is_tied_outside = True
    tower = Lfm3Vision
    text_model_types = ("lfm3",)
    other_parts = ("model.vision_tower", "model.multi_modal_projector")
    other_keys = ("projector_hidden_act", "projector_hidden_size", "projector_bias")


def _attention(scope: LayerScope, kind: str) -> GroupedQueryAttention:
    config = scope.config
    return GroupedQueryAttention(
        scope,
        head_dim=128,
        rope_settings=rope_config(config, kind),
        use_bias=config.get("attention_bias", False),
        qk_norm=lambda _, head_dim: lfm_norm(scope, head_dim),
        span=layer_span(config, kind, default_window=256),
        output_gate=OutputGate("g_proj", per_head=True) if config.get("use_attention_gate", True) else None,
    )


FAMILY = Family(
    "LFM3; LFM3-VL",
    (Lfm3ForCausalLM, Lfm3VlForConditionalGeneration),
    "as LFM2, with windows in every other layer of attention, a gate per head, norms before and after each block; a "
    "tower of convolutions and attention (LFM3-VL)",
)
