"""Muse Glimmer: sandwich norms, gated attention, normed embeddings; three of four layers have a window and a rope."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, layer_span, listed_layer_type
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import SandwichNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.norm import JaxRmsNorm
from jaxis.layers.output_gate import OutputGate
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.text_part import InnerTextPart
from jaxis.models.common.towers.muse_glimmer import MuseGlimmerVision


class MuseGlimmerDecoderLayer(SandwichNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config, index = scope.config, scope.layer_index
        has_pattern = bool((config["num_hidden_layers"] - 1 - index) % 4)
        kind = listed_layer_type(config, index, FULL_ATTENTION, SLIDING_ATTENTION)
        if kind is None:
            kind = SLIDING_ATTENTION if has_pattern else FULL_ATTENTION
        thetas, use_bias = config.get("layer_rope_theta"), config.get("attention_bias", False)
        head_dim = config.get("head_dim", 128)
        super().__init__(
            scope,
            self_attn=GroupedQueryAttention(
                scope / "self_attn",
                head_dim=head_dim,
                use_rope=thetas[index] != 0 if thetas else has_pattern,
                rope_settings=rope_config(config, theta=(thetas and thetas[index]) or None),
                scale=config.get("qk_scale_factor", 3.87) * head_dim**-0.5,
                use_bias=use_bias,
                qk_norm=lambda _, head_dim: rms_norm(scope, head_dim, use_weight=False),
                span=layer_span(config, kind, default_window=2048),
                output_gate=OutputGate("gate_proj"),
            ),
            mlp=GatedMLP(scope / "mlp", activation=config.get("hidden_activation", "silu")),
            make_norm=_norm,
            make_post_norm=_post_norm,
        )


class MuseGlimmerForConditionalGeneration(InnerTextPart):
    """The text model, with its image encoder; videos are not supported."""

    tower = MuseGlimmerVision
    layer_class = MuseGlimmerDecoderLayer
    # One module without a weight.
    renames = (("self_attn.qk_norm", "self_attn.k_norm"), ("self_attn.qk_norm", "self_attn.q_norm"))
    text_model_types = ("muse_glimmer_text",)
    other_parts = ("model.vision_tower", "model.vision_adapter", "model.vision_projection")
    other_keys = ("out_hidden_size", "projector_hidden_size", "projector_hidden_act")

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect("hidden_act", config.get("hidden_activation", "silu"))

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(
            embed_norm=rms_norm(scope, use_weight=False),
            logits_multiplier=scope.config.get("output_multiplier", 0.19611613513818404),
            logits_soft_cap=scope.config.get("final_logit_softcapping", 20.0),
        )


def _norm(scope: LayerScope) -> JaxRmsNorm:
    return rms_norm(scope, add_unit_offset=True)


def _post_norm(scope: LayerScope) -> JaxRmsNorm:
    return rms_norm(scope, add_unit_offset=True, epsilon=scope.config.get("post_norm_eps", 1e-8))


FAMILY = Family(
    "Muse Glimmer",
    (MuseGlimmerForConditionalGeneration,),
    "a gate on attention's output, norms before and after, normed embeddings, a window and RoPE in three of "
    "four layers; a tower with windows",
)
