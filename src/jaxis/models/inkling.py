"""Inkling, its text: biases of scores by distance, short convolutions, shared experts that the router weighs, too."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np
from flax import nnx

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.checkpoint_values import value_of_either
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import listed_layer_type
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.causal_conv import ResidualConv
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.embed import JaxLmHead
from jaxis.layers.experts import StackLayout
from jaxis.layers.leaves import lm_head, rms_norm
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.module import JaxModule, make_parameter
from jaxis.layers.moe import SharedExpertMoE
from jaxis.layers.query_scale import FlooredQueryScale
from jaxis.layers.relative_attention import RelativeAttention
from jaxis.layers.routing import Routing
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.sparse_layers import is_sparse_layer
from jaxis.models.common.text_part import TextPart

_FULL, _SLIDING = "hybrid", "hybrid_sliding"
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
        config, width = scope.config, _conv_width(scope.config)
        size: int = config["hidden_size"]
        self.attn_sconv = ResidualConv(scope / "attn_sconv", size, width)
        self.mlp_sconv = ResidualConv(scope / "mlp_sconv", size, width)
        self.input_layernorm = rms_norm(scope)
        self.self_attn = _attention(scope / "self_attn")
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


def _attention(scope: LayerScope) -> RelativeAttention:
    config, is_sliding = scope.config, _is_sliding(scope)
    prefix = "swa_" if is_sliding else ""
    head_dim: int = config[f"{prefix}head_dim"]
    window: int = config["sliding_window_size"]
    floor = config.get("log_scaling_n_floor")
    scale = None
    if floor is not None and not is_sliding:
        scale = FlooredQueryScale(config.get("log_scaling_alpha", 0.1), 1, scope.max_model_len, floor=floor)
    return RelativeAttention(
        scope,
        extent=window if is_sliding else config.get("rel_extent", 1024),
        relative_size=config.get("d_rel", 16),
        conv_width=_conv_width(config),
        num_heads=config[f"{prefix}num_attention_heads"],
        num_kv_heads=config[f"{prefix}num_key_value_heads"],
        layer_head_dim=head_dim,
        scale=1 / head_dim,
        qk_norm=True,
        query_scale=scale,
        span=AttentionSpan(window) if is_sliding else FULL_CONTEXT,
    )


def _feed_forward(scope: LayerScope) -> FeedForward:
    config = scope.config
    dense_size = config.get("dense_intermediate_size")
    if not is_sparse_layer(config, scope.layer_index, default_first_sparse=config.get("dense_mlp_idx", 0)):
        return ScaledMLP(scope, intermediate_size=config["intermediate_size"] if dense_size is None else dense_size)
    routing = Routing(
        num_experts=config["n_routed_experts"],
        num_experts_per_token=config["num_experts_per_tok"],
        score_function="sigmoid",
        renormalize=True,
        scaling_factor=config.get("route_scale", 8.0),
        float32_logits=True,
        num_shared=config.get("n_shared_experts", 2),
    )
    size = config["moe_intermediate_size"] if dense_size is None else config["intermediate_size"]
    layout = StackLayout(transposed=False, interleaved=True)
    return SharedExpertMoE(scope, routing=routing, intermediate_size=size, stack_layout=layout)


class InklingForConditionalGeneration(TextPart, CausalLM):
    layer_class = InklingDecoderLayer
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
    module_renames = (("embed_tokens.embed_norm", "embed_norm"),)
    other_parts = ("model.visual", "model.audio", "vision_tower", "audio_tower")
    other_keys = (
        *("vision_config", "audio_config", "image_token_id", "audio_token_id", "image_bos_token_id"),
        *("audio_bos_token_id", "mtp_config"),
    )

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        for key, value in _EXPECTED.items():
            config.expect(key, value)
        for key in ("num_mtp_layers", "chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids"):
            config.ignore(key, because="it is about layers that predict later tokens, which are not loaded")
        config.ignore("max_position_embeddings", because="no layer encodes positions")
        config.ignore("number_of_conv_states", because="a layer has four")
        config.ignore("rms_norm_eps_moe_gate", because="the reference's router has no norm")
        config.ignore("dense_mlp_idx", because="mlp_layer_types may name each layer's kind")
        config.ignore("intermediate_size", "moe_intermediate_size", because="layers of the other kind have it")
        config.ignore("tie_word_embeddings", because="the reference has two tables in any case")

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(
            embed_norm=rms_norm(scope),
            logits_multiplier=1 / scope.config.get("logits_mup_width_multiplier", 24.0),
            prediction_modules=("model.mtp.",),
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


FAMILY = Family(
    "Inkling (text)",
    (InklingForConditionalGeneration,),
    "no RoPE, but biases of scores by distance that each token mixes of learned profiles; windows in most layers, "
    "four short convolutions a layer, two shared experts that the router weighs with the chosen ones",
)
