"""Inkling and Inkling 2, their text: biases of scores by distance, four short convolutions a layer, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.checkpoint_values import value_of_either
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import listed_layer_type
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.attention_residual import NormedMixture
from jaxis.layers.causal_conv import DynamicConv, ResidualConv
from jaxis.layers.checkpoint_names import Rename
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.embed import JaxLmHead
from jaxis.layers.experts import StackLayout
from jaxis.layers.glu import SiTU
from jaxis.layers.leaves import lm_head, rms_norm
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.moe import SharedExpertMoE, SparseMoE
from jaxis.layers.query_scale import FlooredQueryScale
from jaxis.layers.relative_attention import ClippedRelativeAttention, RelativeAttention
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.residual_blocks import MixingDecoderLayer, MixingModel
from jaxis.models.common.sparse_layers import is_sparse_layer
from jaxis.models.common.text_part import TextPart
from jaxis.models.common.towers.inkling import Inkling2Vision, InklingVision

_FULL, _SLIDING = "hybrid", "hybrid_sliding"
_LAYOUT = StackLayout(transposed=False, interleaved=True)
_EXPECTED = {
    **dict.fromkeys(("use_sconv", "use_embed_norm", "shared_expert_sink", "use_gate_bias", "norm_after_topk"), True),
    **{"use_global_scale": True, "q_bias": False, "o_bias": False},
    **{"gate_activation": "sigmoid", "final_logit_softcapping": None},
}


class InklingDecoderLayer(JaxModule):
    """`x = x + attn_sconv(self_attn(norm(x)))`
    `x = x + mlp_sconv(mlp(norm(x)))`
    """

    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        make_conv = partial(ResidualConv, width=_conv_width(config))
        self.attn_sconv = make_conv(scope / "attn_sconv", config["hidden_size"])
        self.mlp_sconv = make_conv(scope / "mlp_sconv", config["hidden_size"])
        self.input_layernorm = rms_norm(scope)
        head_dim = config["swa_head_dim" if _is_sliding(scope) else "head_dim"]
        self.self_attn = _attention(
            scope / "self_attn", RelativeAttention, make_conv=make_conv, qk_norm=True, scale=1 / head_dim
        )
        self.post_attention_layernorm = rms_norm(scope)
        self.mlp = _feed_forward(scope / "mlp")

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """x [T, E] -> the updated caches, and [T, E]."""
        after_attention, after_mlp, *of_attention = kv_cache
        of_attention, attended = self.self_attn(of_attention, self.input_layernorm(x), metadata)
        after_attention, attended = self.attn_sconv(after_attention, attended, metadata)
        x = x + attended
        after_mlp, fed = self.mlp_sconv(after_mlp, self.mlp(self.post_attention_layernorm(x), metadata), metadata)
        return (after_attention, after_mlp, *of_attention), x + fed


class ScaledMLP(GatedMLP):
    """`GatedMLP` with a learned factor `global_scale` [1] of its output."""

    def __init__(self, scope: LayerScope, *, intermediate_size: int) -> None:
        super().__init__(scope, intermediate_size=intermediate_size, packed_gate_up=True, interleaved=True)
        self.global_scale = make_parameter(scope.rngs, nnx.initializers.ones, (1,), scope.dtype, axes=(None,))

    def __call__(self, x: jax.Array, metadata: AttentionMetadata | None = None) -> jax.Array:
        return super().__call__(x, metadata) * self.global_scale[...]


def _conv_width(config: HFConfig) -> int:
    return value_of_either(config, "sconv_kernel_size", "conv_kernel_size")


def _is_sliding(scope: LayerScope) -> bool:
    """Returns whether the layer has a window, by `layer_types`, `local_layer_ids`, or else unless it is a sixth one."""
    config, index = scope.config, scope.layer_index
    if (kind := listed_layer_type(config, index, _FULL, _SLIDING)) is not None:
        config.ignore("local_layer_ids", because="layer_types names each layer's type")
        return kind == _SLIDING
    listed = config.get("local_layer_ids")
    return (index + 1) % 6 != 0 if listed is None else index in listed


def _attention(scope: LayerScope, make: Callable[..., RelativeAttention], **options: Any) -> RelativeAttention:
    """Creates attention of the layer's sizes; `options` are those that differ between the families."""
    config, is_sliding = scope.config, _is_sliding(scope)
    prefix, window = "swa_" if is_sliding else "", config["sliding_window_size"]
    floor, scale = config.get("log_scaling_n_floor"), None
    if floor is not None and not is_sliding:
        scale = FlooredQueryScale(config.get("log_scaling_alpha", 0.1), 1, scope.max_model_len, floor=floor)
    return make(
        scope,
        extent=window if is_sliding else config.get("rel_extent", 1024),
        relative_size=config.get("d_rel", 16),
        num_heads=config[f"{prefix}num_attention_heads"],
        num_kv_heads=config[f"{prefix}num_key_value_heads"],
        layer_head_dim=config[f"{prefix}head_dim"],
        query_scale=scale,
        span=AttentionSpan(window) if is_sliding else FULL_CONTEXT,
        **options,
    )


def _ignore_what_both_have(config: HFConfig) -> None:
    config.ignore("max_position_embeddings", because="no layer encodes positions")
    config.ignore("number_of_conv_states", because="a layer has four")
    config.ignore("tie_word_embeddings", because="the reference has two tables in any case")


def _routing(config: HFConfig, num_shared: int) -> Routing:
    return Routing.of(
        config,
        score_function="sigmoid",
        renormalize=True,
        scaling_factor=config.get("route_scale", 8.0),
        float32_logits=True,
        num_shared=num_shared,
    )


def _feed_forward(scope: LayerScope) -> FeedForward:
    config = scope.config
    dense_size = config.get("dense_intermediate_size")
    if not is_sparse_layer(config, scope.layer_index, default_first_sparse=config.get("dense_mlp_idx", 0)):
        return ScaledMLP(scope, intermediate_size=config["intermediate_size"] if dense_size is None else dense_size)
    routing = _routing(config, config.get("n_shared_experts", 2))
    size = config["moe_intermediate_size"] if dense_size is None else config["intermediate_size"]
    return SharedExpertMoE(scope, routing=routing, intermediate_size=size, stack_layout=_LAYOUT)


class Inkling2DecoderLayer(MixingDecoderLayer):
    """Inkling's layer with mixtures of residuals; those of layers without a window differ for queries, keys and values.

    Convolutions of such a layer's keys and values have taps that depend on the token.
    """

    def __init__(self, scope: LayerScope) -> None:
        config, is_sliding = scope.config, _is_sliding(scope)
        super().__init__(scope, config["n_layers_per_attn_res_block"])
        size, width = config["hidden_size"], _conv_width(config)
        make_conv = partial(ResidualConv, width=width, factor=(width + 1) ** -0.5)
        self.attn_sconv, self.mlp_sconv = (make_conv(scope / name, size) for name in ("attn_sconv", "mlp_sconv"))
        self.norm_names = ("input_layernorm",) if is_sliding else ("q_input_norm", "k_input_norm", "v_input_norm")
        for name in self.norm_names:
            setattr(self, name, rms_norm(scope))
        self.attention_input = None
        if scope.layer_index > 0:
            self.attention_input = NormedMixture(scope / "attention_input", len(self.norm_names))
        self.mlp_input = NormedMixture(scope / "mlp_input")
        num_kv_heads: int = config["num_key_value_heads"]
        dynamic = partial(DynamicConv, width=width, num_heads=num_kv_heads, factor=(2 * width + 1) ** -0.5)
        self.self_attn = _attention(
            scope / "self_attn",
            ClippedRelativeAttention,
            make_conv=make_conv if is_sliding else dynamic,
            bound=config["qk_l2_clip_threshold"],
            relative_bound=config["rel_l2_clip_threshold"],
        )
        self.post_attention_layernorm = rms_norm(scope)
        self.mlp = SparseMoE(
            scope / "mlp",
            routing=_routing(config, 0),
            intermediate_size=value_of_either(config, "moe_intermediate_size", "intermediate_size"),
            gated_unit=SiTU(config["mlp_gate_softcap"], config["mlp_up_softcap"]),
            use_selection_bias=True,
            stack_layout=_LAYOUT,
        )

    def attend(self, kv_cache: LayerCache, vectors: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        after_attention, after_mlp, *of_attention = kv_cache
        mixed = [vectors[:, -1]] * len(self.norm_names)
        if self.attention_input is not None:
            mixed = self.attention_input.mixtures(vectors)
        x, *others = (getattr(self, name)(each) for name, each in zip(self.norm_names, mixed, strict=True))
        of_attention, attended = self.self_attn(of_attention, x, metadata, *others)
        after_attention, attended = self.attn_sconv(after_attention, attended, metadata)
        return (after_attention, after_mlp, *of_attention), attended

    def feed(self, kv_cache: LayerCache, vectors: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        after_attention, after_mlp, *of_attention = kv_cache
        fed = self.mlp(self.post_attention_layernorm(self.mlp_input(vectors)), metadata)
        after_mlp, fed = self.mlp_sconv(after_mlp, fed, metadata)
        return (after_attention, after_mlp, *of_attention), fed


class Inkling2Model(MixingModel):
    block_size_key = "n_layers_per_attn_res_block"
    make_mixture = NormedMixture


class InklingForConditionalGeneration(TextPart, CausalLM):
    layer_class = InklingDecoderLayer
    tower = InklingVision
    text_renames = (("model.llm", "model"),)
    text_model_types = ("inkling_text",)
    renames = (
        ("model.unembed", "lm_head"),
        ("model.embed", "model.embed_tokens"),
        ("attn_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
        ("attn", "self_attn"),
        *((f"self_attn.w{name}", f"self_attn.{name[0]}_proj") for name in ("q_du", "k_dv", "v_dv", "r_du", "o_ud")),
        ("rel_logits_proj.proj", "rel_logits_proj.weight"),
        ("mlp.w13_dn", "mlp.gate_up_proj"),
        ("mlp.w2_md", "mlp.down_proj"),
        ("mlp.gate.bias", "mlp.gate.e_score_correction_bias"),
        ("experts.w13_weight", "experts.gate_up_proj"),
        ("experts.w2_weight", "experts.down_proj"),
        ("shared_experts.shared_w13_weight", "shared_experts.gate_up_proj"),
        ("shared_experts.shared_w2_weight", "shared_experts.down_proj"),
    )
    transposed = (".rel_logits_proj.proj",)
    prediction_modules = ("model.mtp.",)
    module_renames = (("embed_tokens.embed_norm", "embed_norm"),)
    other_parts = ("model.visual", "model.audio", "vision_tower", "audio_tower")
    other_keys = (
        *("vision_config", "audio_config", "image_token_id", "audio_token_id", "image_bos_token_id"),
        *("audio_bos_token_id", "mtp_config"),
    )

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect_all(**_EXPECTED)
        for key in ("num_mtp_layers", "chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids"):
            config.ignore(key, because="it is about layers that predict later tokens, which are not loaded")
        config.ignore("rms_norm_eps_moe_gate", because="the reference's router has no norm")
        config.ignore("dense_mlp_idx", because="mlp_layer_types may name each layer's kind")
        config.ignore("intermediate_size", "moe_intermediate_size", because="layers of the other kind have it")
        _ignore_what_both_have(config)

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(
            embed_norm=rms_norm(scope),
            logits_multiplier=1 / scope.config.get("logits_mup_width_multiplier", 24.0),
        )

    @classmethod
    def head(cls, scope: LayerScope, options: DecoderOptions) -> JaxLmHead:
        del options
        return lm_head(scope, vocab_size=scope.config.get("unpadded_vocab_size"))

    def is_tied(self, config: HFConfig, default: bool) -> bool:
        del config, default
        return False

    def without_redundant_tensors(self, weights: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
        """Also cuts off the head's rows of no token."""
        for name, tensor in super().without_redundant_tensors(weights):
            yield name, tensor[: self.vocab_size] if name.startswith("lm_head.") and tensor.ndim else tensor


class Inkling2ForConditionalGeneration(InklingForConditionalGeneration):
    layer_class = Inkling2DecoderLayer
    tower = Inkling2Vision
    model_class = Inkling2Model
    text_model_types = ("inkling2_text",)
    renames = (
        *InklingForConditionalGeneration.renames,
        ("experts.w13_weight_scale", "experts.gate_up_proj_weight_scale_inv"),
        ("experts.w2_weight_scale", "experts.down_proj_weight_scale_inv"),
        ("q_l2_clip", "q_norm"),
        ("rel_l2_clip", "r_norm"),
        *((f"{name}_sconv.weight_proj", f"{name}_sconv.taps.weight") for name in "kv"),
        ("model.attn_res.output_query", "model.output_attn_res.query.weight"),
    )
    module_renames = (
        ("o_proj.gate_proj", "gate_attn"),
        *((f"{name}_proj.linear", f"{name}_proj") for name in "qkvo"),
        ("relative_position_bias.linear", "r_proj"),
        ("self_attn.sink_proj", "self_attn.attn_sink_proj"),
    )

    @classmethod
    def inner_renames(cls, config: HFConfig) -> Sequence[Rename]:
        of_layers = (
            (f"model.attn_res.{name}_queries.{i}", f"model.layers.{i + offset}.{here}.query.weight")
            for name, here, offset in (("attn", "attention_input", 1), ("mlp", "mlp_input", 0))
            for i in range(config["num_hidden_layers"] - offset)
        )
        return *super().inner_renames(config), *of_layers

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        config.expect_all(scoring_func="sigmoid", hidden_act="silu")
        _ignore_what_both_have(config)

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(embed_norm=rms_norm(scope), logits_soft_cap=scope.config["final_logit_softcapping"])

    def without_redundant_tensors(self, weights: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
        """Also makes rows of single queries of mixtures."""
        for name, tensor in super().without_redundant_tensors(weights):
            yield name, tensor[None] if name.endswith(".query.weight") and tensor.ndim == 1 else tensor


FAMILY = Family(
    "Inkling, Inkling 2",
    (InklingForConditionalGeneration, Inkling2ForConditionalGeneration),
    "no RoPE, but biases of scores by distance that each token mixes of learned profiles; windows in most layers, four "
    "short convolutions a layer, two shared experts that the router weighs; 2: bounded heads, sinks of each token, "
    "attention residuals",
)
