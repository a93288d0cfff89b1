"""Code shared by LFM2's families: layers of short convolutions, with some layers of attention between them."""

from __future__ import annotations

from functools import partial

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import CONVOLUTION, FULL_ATTENTION, listed_layer_type
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import FeedForward, GatedMLP
from jaxis.layers.norm import JaxRmsNorm
from jaxis.layers.scope import LayerScope
from jaxis.layers.short_conv import ShortConv
from jaxis.models.common.decoder import CausalLM


class LfmDecoderLayer(PreNormDecoderLayer):
    """A decoder layer with a convolution or with attention, and a feed-forward block."""

    def __init__(self, scope: LayerScope, mlp: FeedForward) -> None:
        config = scope.config
        kind = listed_layer_type(config, scope.layer_index, CONVOLUTION, FULL_ATTENTION)
        if kind is None:
            has_attention = scope.layer_index in config.get("full_attn_idxs", range(config["num_hidden_layers"]))
            kind = FULL_ATTENTION if has_attention else CONVOLUTION
        if kind == CONVOLUTION:
            name, mixer = "conv", ShortConv(scope / "conv", use_bias=config.get("conv_bias", False))
        else:
            name, mixer = "self_attn", _attention(scope / "self_attn")
        super().__init__(scope, self_attn=mixer, mlp=mlp, mixer_name=name)


def lfm_norm(scope: LayerScope, num_features: int | None = None) -> JaxRmsNorm:
    """An `rms_norm` with LFM's key of the epsilon."""
    return rms_norm(scope, num_features, epsilon=scope.config.get("norm_eps", 1e-5))


def _attention(scope: LayerScope) -> GroupedQueryAttention:
    return GroupedQueryAttention(
        scope,
        rope_settings=rope_config(scope.config, default_theta=1_000_000.0),
        qk_norm=lambda _, head_dim: lfm_norm(scope, head_dim),
    )


lfm_mlp = partial(GatedMLP, activation="silu")
"""Creates a dense feed-forward block."""


class LfmCausalLM(CausalLM):
    make_norm = lfm_norm
    tied_by_default = True
    renames = (
        ("model.embedding_norm", "model.norm"),
        ("operator_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("self_attn.q_layernorm", "self_attn.q_norm"),
        ("self_attn.k_layernorm", "self_attn.k_norm"),
        ("self_attn.out_proj", "self_attn.o_proj"),
        ("feed_forward", "mlp"),
        ("mlp.w1", "mlp.gate_proj"),
        ("mlp.w3", "mlp.up_proj"),
        ("mlp.w2", "mlp.down_proj"),
        ("mlp.expert_bias", "mlp.gate.e_score_correction_bias"),
    )

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        # Keys of the makers' own code, which the reference does not read.
        for key in ("block_dim", "conv_dim", "conv_dim_out"):
            config.expect(key, config["hidden_size"])
        config.expect_all(block_norm_eps=config.get("norm_eps", 1e-5), block_use_swiglu=True, use_pos_enc=True)
        config.expect("num_heads", config["num_attention_heads"])
        if config.get("layer_types") is not None:
            config.ignore("full_attn_idxs", because="layer_types names each layer's type")

    def is_tied(self, config: HFConfig, default: bool) -> bool:
        """Returns whether the head is tied. LFM2's files have another name of the key."""
        return config.get("tie_embedding", super().is_tied(config, default))
