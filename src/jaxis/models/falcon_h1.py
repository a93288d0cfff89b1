"""Falcon-H1: Mamba2 and attention side by side in each layer, with multipliers on nearly everything."""

from __future__ import annotations

import jax

from jaxis.config.hf_config import HFConfig
from jaxis.kernels.materialize import materialize
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM, DecoderOptions
from jaxis.models.common.family import Family
from jaxis.models.common.mamba import check_mamba_keys, mamba_of_prefixed_keys


class FalconH1DecoderLayer(JaxModule):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        self.ssm_in_multiplier = config.get("ssm_in_multiplier", 1.0)
        self.ssm_out_multiplier = config.get("ssm_out_multiplier", 1.0)
        self.attention_in_multiplier = config.get("attention_in_multiplier", 1.0)
        self.attention_out_multiplier = config.get("attention_out_multiplier", 1.0)
        self.input_layernorm = rms_norm(scope)
        self.mamba = mamba_of_prefixed_keys(
            scope / "mamba",
            inner_size=config.get("mamba_d_ssm", 1024),
            out_bias=config.get("projectors_bias", False),
            has_norm=config.get("mamba_rms_norm", False),
            multipliers=tuple(config.get("ssm_multipliers", ())) or None,
        )
        self.self_attn = _attention(scope / "self_attn")
        self.post_attention_layernorm = rms_norm(scope)
        gate_multiplier, output_multiplier = config.get("mlp_multipliers", (1.0, 1.0))
        self.mlp = GatedMLP(
            scope / "mlp",
            use_bias=config.get("mlp_bias", False),
            multipliers=(gate_multiplier, output_multiplier),
        )

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        """x [T, E] -> the updated state and cache (None without them), and [T, E]."""
        state, kv_cache = (None, None) if kv_cache is None else kv_cache
        normalised = self.input_layernorm(x)
        state, from_state = self.mamba(state, scaled(normalised, self.ssm_in_multiplier), metadata)
        kv_cache, attended = self.self_attn(kv_cache, scaled(normalised, self.attention_in_multiplier), metadata)
        # Rounding keeps programs from fusing products with the sum, so that x is the same in all programs.
        from_state = materialize(scaled(from_state, self.ssm_out_multiplier))
        x = x + (from_state + materialize(scaled(attended, self.attention_out_multiplier)))
        return (state, kv_cache), x + materialize(self.mlp(self.post_attention_layernorm(x), metadata))


def _attention(scope: LayerScope) -> GroupedQueryAttention:
    config = scope.config
    head_dim: int = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    # A multiplier of keys equals one of scores.
    scale = config.get("key_multiplier", 1.0) * head_dim**-0.5
    return GroupedQueryAttention(scope, scale=scale, use_bias=config.get("attention_bias", False))


class FalconH1ForCausalLM(CausalLM):
    layer_class = FalconH1DecoderLayer
    renames = (
        ("model.final_layernorm", "model.norm"),
        ("pre_ff_layernorm", "post_attention_layernorm"),
        ("feed_forward", "mlp"),
    )
    unadaptable = ("out_proj",)

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        check_mamba_keys(config)
        config.expect_all(mamba_use_mlp=True, attn_layer_indices=None)
        if config.get("mamba_rms_norm", False):
            config.expect("mamba_norm_before_gate", False)
        else:
            config.ignore("mamba_norm_before_gate", because="there is no norm")
        config.ignore("mamba_expand", because="mamba_d_ssm says how many features Mamba2 has")

    @classmethod
    def options(cls, scope: LayerScope) -> DecoderOptions:
        return DecoderOptions(
            embedding_multiplier=scope.config.get("embedding_multiplier", 1.0),
            logits_multiplier=scope.config.get("lm_head_multiplier", 1.0),
        )


FAMILY = Family(
    "Falcon-H1",
    (FalconH1ForCausalLM,),
    "Mamba2 and attention side by side in each layer, multipliers on nearly everything",
    gguf=("falcon-h1",),
)
