"""Bamba: Mamba2 layers, and some of attention with rope on half of each head."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config
from jaxis.layers.decoder_layer import PreNormDecoderLayer
from jaxis.layers.grouped_query_attention import GroupedQueryAttention
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.mamba import TINY_MAMBA2, check_mamba_keys, mamba_of_prefixed_keys


class BambaDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        if scope.layer_index in (config.get("attn_layer_indices") or ()):
            name, mixer = "self_attn", _attention(scope / "self_attn")
        else:
            name, mixer = "mamba", mamba_of_prefixed_keys(scope / "mamba")
        mlp = GatedMLP(scope / "mlp", use_bias=config.get("mlp_bias", False))
        super().__init__(scope, self_attn=mixer, mlp=mlp, mixer_name=name)


def _attention(scope: LayerScope) -> GroupedQueryAttention:
    rope = rope_config(scope.config, default_partial_rotary_factor=0.5)
    return GroupedQueryAttention(scope, rope_settings=rope, use_bias=scope.config.get("attention_bias", False))


class BambaForCausalLM(CausalLM):
    layer_class = BambaDecoderLayer
    renames = (
        ("model.final_layernorm", "model.norm"),
        ("pre_ff_layernorm", "post_attention_layernorm"),
        ("feed_forward", "mlp"),
    )

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        check_mamba_keys(config)
        config.ignore("z_loss_coefficient", because="it is for training")


FAMILY = Family("Bamba", (BambaForCausalLM,), "Mamba2 in most layers, partial RoPE", tiny=TINY_MAMBA2)
