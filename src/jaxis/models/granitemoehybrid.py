"""Granite 4: Mamba2 layers with some attention layers, or attention alone; a dense block, with or without experts."""

from __future__ import annotations

import jax

from jaxis.config.hf_config import HFConfig
from jaxis.kernels.materialize import materialize
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.decoder_layer import LayerCache, LayerOutput
from jaxis.layers.leaves import rms_norm
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.module import JaxModule
from jaxis.layers.scale import scaled
from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.granite import GRANITE_MOE_RENAMES, GraniteCausalLM, granite_attention, granite_moe
from jaxis.models.common.mamba import TINY_MAMBA2, check_mamba_keys, has_mamba, ignore_rope, mamba_of_prefixed_keys


class GraniteMoeHybridDecoderLayer(JaxModule):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        self.residual_multiplier = config.get("residual_multiplier", 1.0)
        self.input_layernorm = rms_norm(scope)
        self.mamba = self.self_attn = self.mlp = None
        if has_mamba(config, scope.layer_index):
            self.mamba = mamba_of_prefixed_keys(scope / "mamba")
        else:
            use_rope = config.get("position_embedding_type") == "rope"
            self.self_attn = granite_attention(scope / "self_attn", use_rope=use_rope)
        self.post_attention_layernorm = rms_norm(scope)
        if config.get("num_local_experts", 8):
            self.mlp = granite_moe(scope / "mlp")
        self.shared_mlp = GatedMLP(
            scope / "shared_mlp",
            intermediate_size=config["shared_intermediate_size"],
            packed_gate_up=True,
        )

    def __call__(self, kv_cache: LayerCache, x: jax.Array, metadata: AttentionMetadata) -> LayerOutput:
        mixer = self.self_attn if self.mamba is None else self.mamba
        assert mixer is not None
        kv_cache, mixed = mixer(kv_cache, self.input_layernorm(x), metadata)
        # Rounding keeps programs from fusing products with the sum, so that x is the same in all programs.
        x = x + materialize(scaled(mixed, self.residual_multiplier))
        normalised = self.post_attention_layernorm(x)
        fed = self.shared_mlp(normalised)
        if self.mlp is not None:
            fed = self.mlp(normalised, metadata) + fed
        return kv_cache, x + materialize(scaled(fed, self.residual_multiplier))


class GraniteMoeHybridForCausalLM(GraniteCausalLM):
    layer_class = GraniteMoeHybridDecoderLayer
    router_aux_loss_coef = 0.001
    renames = (
        *GRANITE_MOE_RENAMES,
        ("shared_mlp.input_linear", "shared_mlp.gate_up_proj"),
        ("shared_mlp.output_linear", "shared_mlp.down_proj"),
    )

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        check_mamba_keys(config)
        config.expect("position_embedding_type", None, "nope", "rope")
        if config.get("position_embedding_type") != "rope":
            ignore_rope(config)
        for key in ("num_attention_heads", "num_key_value_heads", "attention_bias", "attention_multiplier"):
            config.ignore(key, because="Mamba2 does not have it")
        sizes = ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "conv_bias", "proj_bias")
        for key in sizes:
            config.ignore(f"mamba_{key}", because="attention does not have it")
        if not config.get("num_local_experts", 8):
            config.ignore("num_experts_per_tok", "intermediate_size", because="there are no experts")


FAMILY = Family(
    "Granite 4",
    (GraniteMoeHybridForCausalLM,),
    "Mamba2 in most layers, attention without RoPE (or attention with RoPE alone), Granite's multipliers, "
    "experts beside a dense block",
    gguf=("granitehybrid",),
    tiny={**TINY_MAMBA2, "shared_intermediate_size": 80},
)
