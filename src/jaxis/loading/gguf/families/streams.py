"""GLM-5.3-Flash, Kimi and Hy4: latent attention with residual streams, Kimi Delta Attention, or both."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxis.loading.gguf.common_facts import (
    DENSE_FIRST,
    INDEXER,
    PREDICTION_LAYERS,
    ROUTED_EXPERTS,
    SHARED_COUNT,
    SIGMOID,
    SINKHORN,
    STREAMS,
    SWIGLU_LIMIT,
    experts,
)
from jaxis.loading.gguf.config_reader import FULL, ConfigReader, Values
from jaxis.loading.gguf.families.deepseek import (
    INDEXER_NAMES,
    LATENT_ATTENTION,
    LATENT_NAMES,
    read_indexer_types,
)
from jaxis.loading.gguf.table import GGUF, Fact, constant, has, key, only
from jaxis.loading.gguf.tensor_names import CONNECTION_OF_OUTPUT, CONNECTIONS, W1_W3_W2, GGUFNames, each

_DELTA_NAMES = {
    **each("q k v", "ssm_conv1d_{}", "self_attn.{}_conv1d"),
    **each("f_a f_b g_a g_b", "ssm_{}", "self_attn.{}_proj"),
    **{"ssm_beta": "self_attn.b_proj", "ssm_a": "self_attn.A_log=", "ssm_dt": "self_attn.dt_bias="},
    "ssm_norm": "self_attn.o_norm",
}
_KIMI_NAMES = GGUFNames(
    {
        **LATENT_NAMES,
        **_DELTA_NAMES,
        # The block of experts has a name of its own.
        **each("gate up down", "ffn_{}_shexp", "block_sparse_moe.shared_experts.{}_proj"),
        "ffn_gate_inp": "block_sparse_moe.gate",
        "exp_probs_b": "block_sparse_moe.gate.e_score_correction_bias=",
    },
    experts="block_sparse_moe.experts",
    projections=W1_W3_W2,
    renames=(),
)
_RESIDUALS = ("self_attention_res", "mlp_res")


def _delta_layers(reader: ConfigReader) -> Values:
    """Layers without key-value heads have Kimi Delta Attention, with as many heads as attention."""
    attends = [heads > 0 for heads in reader.kv_heads()]
    return {
        "layer_types": [FULL if each else "linear_attention" for each in attends],
        "linear_num_heads": reader.num_heads,
        "linear_head_dim": reader.keys.integer("kda.head_dim"),
        "linear_conv_kernel_dim": reader.keys.integer("ssm.conv_kernel"),
    }


def _listed_delta_layers(reader: ConfigReader) -> Values:
    """Returns the same as Kimi K3's config.json has it, whose lists count from 1."""
    attends = [heads > 0 for heads in reader.kv_heads()]
    linear = {
        "num_heads": reader.num_heads,
        "head_dim": reader.keys.integer("kda.head_dim"),
        "short_conv_kernel_size": reader.keys.integer("ssm.conv_kernel"),
        "gate_lower_bound": reader.keys.typed("kda.gate_lower_bound", float, None),
        "use_full_rank_gate": reader.keys.has_tensor("ssm_g.weight"),
        "kda_layers": [i for i, each in enumerate(attends, 1) if not each],
        "full_attn_layers": [i for i, each in enumerate(attends, 1) if each],
    }
    return {"linear_attn_config": linear}


def _outputs_of_latents(values: Values) -> list[tuple[str, str]]:
    """Ling 3's latent attention alone has a name of its own for the output projection."""
    latent = (i for i, kind in enumerate(values["layer_types"]) if kind == FULL)
    return [(f".layers.{i}.attention.o_proj.", f".layers.{i}.attention.dense.") for i in latent]


def _limits(reader: ConfigReader) -> Values:
    names = {"swiglu_clamp_exp": "expert_swiglu_limit_list", "swiglu_clamp_shexp": "share_expert_swiglu_limit_list"}
    return {name: reader.keys.for_layers(stored, reader.num_layers) for stored, name in names.items()}


def _norms_of_residuals(reader: ConfigReader) -> Values:
    """Norms of residuals are ones: the file has them in the projections."""
    places = [f"layers.{i}.{name}" for i in range(reader.num_layers) for name in _RESIDUALS]
    for place in (*places, "output_attn_res"):
        reader.small_tensors[f"model.{place}_norm.weight"] = np.ones(reader.hidden_size, np.float32)
    return {}


GGUFS = (
    GGUF(
        ("glm5-next", "glm5_next", "Glm5NextForConditionalGeneration"),
        (
            [LATENT_ATTENTION, ROUTED_EXPERTS, experts("n_routed_experts"), SHARED_COUNT, DENSE_FIRST],
            [
                PREDICTION_LAYERS,
                Fact(_delta_layers),
                INDEXER,
                Fact(read_indexer_types),
                STREAMS,
                SINKHORN,
                SWIGLU_LIMIT,
            ],
            key("linear_lower_bound", "kda.gate_lower_bound", None, float),
            key("index_kpool", "attention.indexer.kpool"),
            [only("attention.indexer.kpool_select_tail", True), only("expert_gating_func", SIGMOID)],
            only("attention.layer_norm_epsilon", 1e-6),  # of the indexer
        ),
        GGUFNames(
            {
                **LATENT_NAMES,
                **INDEXER_NAMES,
                **_DELTA_NAMES,
                **{name: f"{name}=" for name in CONNECTIONS},
                **each("gate ape", "indexer_compressor_{}", "self_attn.indexer.index_kpool_compress_{}="),
            },
            renames=((".model.", ".model.language_model."),),
        ),
    ),
    GGUF(
        ("kimi-linear", "kimi_linear", "KimiLinearForCausalLM"),
        (
            [LATENT_ATTENTION, ROUTED_EXPERTS, experts("num_experts"), DENSE_FIRST, Fact(_listed_delta_layers)],
            [only("expert_gating_func", SIGMOID), constant("norm_topk_prob", True)],
            key("num_shared_experts", "expert_shared_count"),
        ),
        _KIMI_NAMES,
    ),
    GGUF(
        ("bailingmoe3", "bailing_hybrid", "BailingHybridForCausalLM"),
        (
            [LATENT_ATTENTION, ROUTED_EXPERTS, experts("num_experts"), DENSE_FIRST, Fact(_delta_layers)],
            [only("expert_gating_func", SIGMOID), only("kda.safe_gate", True), Fact(_limits)],
            key("short_conv_kernel_size", "ssm.conv_kernel"),
            key("kda_lower_bound", "kda.gate_lower_bound", kind=float),
            key("num_shared_experts", "expert_shared_count"),
            key("moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length", None),
        ),
        GGUFNames(
            {
                **LATENT_NAMES,
                **_DELTA_NAMES,
                **{"ssm_f_a": "self_attn.f_proj", "ssm_g_a": "self_attn.g_proj", "attn_gate": "self_attn.g_proj"},
            }
        ),
        more_renames=_outputs_of_latents,
    ),
    GGUF(
        ("kimi-k3", "kimi_linear", "KimiK3ForCausalLM"),
        (
            [LATENT_ATTENTION, ROUTED_EXPERTS, experts("num_experts"), DENSE_FIRST, Fact(_listed_delta_layers)],
            [only("expert_gating_func", SIGMOID), Fact(_norms_of_residuals)],
            key("num_shared_experts", "expert_shared_count"),
            key("routed_expert_hidden_size", "expert_latent_length", None),
            has("latent_moe_use_norm", "ffn_routed_norm.weight"),
            has("mla_use_output_gate", "attn_gate.weight"),
            constant("hidden_act", "situ"),
            key("activation_situ_beta", "activation.situ_beta", kind=float),
            key("activation_situ_linear_beta", "activation.situ_linear_beta", kind=float),
            key("attn_res_block_size", "attn_res.block_size"),
        ),
        dataclasses.replace(
            _KIMI_NAMES,
            block={
                **_KIMI_NAMES.block,
                **{"ssm_g": "self_attn.g_proj", "attn_gate": "self_attn.g_proj"},
                **{"attn_res_score": "self_attention_res_proj", "ffn_res_score": "mlp_res_proj"},
                **each("down up", "ffn_routed_{}", "block_sparse_moe.routed_expert_{}_proj"),
                "ffn_routed_norm": "block_sparse_moe.routed_expert_norm",
            },
            top_level={"output_res_score": "model.output_attn_res_proj"},
        ),
    ),
    GGUF(
        ("hy_v4", "hy_v4", "HYV4ForCausalLM"),
        (
            [LATENT_ATTENTION, ROUTED_EXPERTS, experts("n_routed_experts"), SHARED_COUNT, DENSE_FIRST],
            [INDEXER, Fact(read_indexer_types), STREAMS, only("expert_gating_func", SIGMOID)],
            key("hc_magnitude", "hyper_connection.magnitude", kind=float),
            key("swiglu_limit", "swiglu_clamp_exp", 0.0, float),
        ),
        GGUFNames(
            LATENT_NAMES
            | INDEXER_NAMES
            | CONNECTIONS
            | {"attn_gate": "self_attn.gate_proj", "attn_sinks": "self_attn.sinks="},
            top_level=CONNECTION_OF_OUTPUT,
        ),
    ),
)
