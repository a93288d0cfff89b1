"""Ling 3: Kimi Delta Attention with bounded decays, gated latent attention as the last layer of each group, experts."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxis.config.hf_config import HFConfig
from jaxis.config.rope_config import rope_config
from jaxis.layers.checkpoint_names import Rename
from jaxis.layers.decoder_layer import PreNormDecoderLayer, SelfAttention
from jaxis.layers.glu import CappedGLU
from jaxis.layers.mla import MultiHeadLatentAttention
from jaxis.layers.output_gate import OutputGate
from jaxis.layers.scope import LayerScope
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.deepseek import LatentAttentionSettings
from jaxis.models.common.family import Family
from jaxis.models.common.kda_hybrid import (
    hybrid_routing,
    kimi_delta_attention,
    listed_as_linear,
)
from jaxis.models.common.sparse_layers import dense_or_sparse, is_sparse_layer


class BailingHybridDecoderLayer(PreNormDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        config = scope.config
        is_sparse = is_sparse_layer(config, scope.layer_index, default_first_sparse=2)
        mlp = dense_or_sparse(
            scope,
            hybrid_routing(config),
            is_sparse=is_sparse,
            num_shared_experts=config["num_shared_experts"] if is_sparse else 0,
            gated_unit=_capped_unit(scope, "expert_swiglu_limit_list"),
            block_unit=_capped_unit(scope, "share_expert_swiglu_limit_list") if is_sparse else None,
        )
        super().__init__(scope, self_attn=_mixer(scope / "self_attn"), mlp=mlp)


def _mixer(scope: LayerScope) -> SelfAttention:
    config = scope.config
    if not _is_linear(config, scope.layer_index):
        gate = OutputGate("g_proj", per_head=True)
        settings = LatentAttentionSettings.with_rope(scope, rope_config(config, default_theta=6_000_000.0))
        return settings.make(MultiHeadLatentAttention, scope, output_gate=gate)
    return kimi_delta_attention(
        scope,
        num_heads=config.get("linear_num_heads", config["num_attention_heads"]),
        # Files that transformers saves have latent attention's rotated dimensions as `head_dim`.
        head_dim=config.get("linear_head_dim", config.get("head_dim", 128)),
        conv_width=config.get("short_conv_kernel_size", 4),
        lower_bound=config.get("kda_lower_bound", -5.0) if config.get("kda_safe_gate", True) else None,
        decay_names=("f_proj",),
        gate_names=("g_proj",),
    )


def _is_linear(config: HFConfig, index: int) -> bool:
    is_linear = listed_as_linear(config, index)
    return (index + 1) % config.get("layer_group_size", 6) != 0 if is_linear is None else is_linear


def _capped_unit(scope: LayerScope, key: str) -> CappedGLU | None:
    """Returns the bounded unit of a layer with a limit in this list of config.json; 0 and null mean no limit.

    The published weights were trained with the limits, although transformers' code ignores them.
    """
    limits = scope.config.get(key)
    limit = limits[scope.layer_index] if limits else None
    return CappedGLU(jax.nn.silu, float(limit)) if limit else None


class BailingHybridForCausalLM(CausalLM):
    layer_class = BailingHybridDecoderLayer
    renames = (
        ("model.word_embeddings", "model.embed_tokens"),
        ("attention", "self_attn"),
        ("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
    )
    # Linear attention's output projection has two names, depending on the writer of the files.
    other_names = (("attention.dense", "self_attn.o_proj"),)
    module_renames = (("self_attn.forget_gate.f_proj", "self_attn.f_proj"),)

    @classmethod
    def all_renames(cls, config: HFConfig) -> Sequence[Rename]:
        """Also renames `dense`, the output projection of layers of latent attention only."""
        latent = [i for i in range(config["num_hidden_layers"]) if not _is_linear(config, i)]
        return *cls.renames, *((f"layers.{i}.self_attn.dense", f"layers.{i}.self_attn.o_proj") for i in latent)

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        num_layers: int = config["num_hidden_layers"]
        group_size: int | None = config.get("layer_group_size")
        if config.get("layer_types") is None and group_size and num_layers % group_size:
            raise config.fault(
                "num_hidden_layers",
                "layer_group_size",
                why="which does not divide it: add layer_types, which says the kind of each layer",
            )
        for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
            limits = config.get(key)
            if limits and len(limits) < num_layers:
                raise config.fault(key, why=f"which has {len(limits)} entries, fewer than {num_layers} layers")
        _expect_what_all_have(config)


def _expect_what_all_have(config: HFConfig) -> None:
    """Checks keys of the makers' own code for the values that every published checkpoint has."""
    config.expect_all(hidden_act="silu", linear_conv_kernel_dim=config.get("short_conv_kernel_size", 4))
    config.ignore("layer_group_size", because="layer_types, where there is one, names each layer's type")
    config.expect("moe_shared_expert_intermediate_size", config.get("moe_intermediate_size"))
    config.expect_all(gated_attention_proj_granularity_type="head_wise", score_function="sigmoid", router_dtype="fp32")
    config.expect_all(no_kda_lora=True, linear_silu=True, use_qk_norm=True, rope_interleave=True)
    config.expect_all(moe_router_enable_expert_bias=True, use_kda_lora=False, use_bias=False, use_qkv_bias=False)
    config.expect_all(use_mla_nope=False, use_nGPT=False, up_proj_norm=False, value_norm=False)
    config.expect_all(scale_router_input=False, group_norm_size=1)
    config.expect("num_kv_heads_for_linear_attn", 0, config["num_attention_heads"])
    config.ignore("partial_rotary_factor", "rotary_dim", because="qk_rope_head_dim says what is rotated")
    config.ignore("model_max_length", because="it is what transformers calls max_position_embeddings")
    config.ignore("mtp_use_kda", because="layers that draft tokens are not loaded")


FAMILY = Family(
    "Ling 3 tiny, flash",
    (BailingHybridForCausalLM,),
    "Kimi Delta Attention with bounded decays; latent attention with a gate per head as the last of each four "
    "or six layers; experts in groups, sigmoid, selection bias, bounded units in the last layers of flash",
    same_code={"BailingMoeV3ForCausalLM": "BailingHybridForCausalLM"},
    other_names={"BailingMoeV3ForCausalLM": BailingHybridForCausalLM},
    gguf=("bailingmoe3",),
)
