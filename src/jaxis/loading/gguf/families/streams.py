"""GLM-5.3-Flash, Kimi K3 and Hy4: latent attention with residual streams, Kimi Delta Attention, or both."""

from __future__ import annotations

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
from jaxis.loading.gguf.families.deepseek import LATENT_ATTENTION, LATENT_NAMES
from jaxis.loading.gguf.table import GGUF, Fact, constant, has, key, only
from jaxis.loading.gguf.tensor_names import CONNECTION_OF_OUTPUT, CONNECTIONS, W1_W3_W2, GGUFNames, each

_DELTA_NAMES = {
    **each("q k v", "ssm_conv1d_{}", "self_attn.{}_conv1d"),
    **each("f_a f_b g_a g_b", "ssm_{}", "self_attn.{}_proj"),
    **{"ssm_beta": "self_attn.b_proj", "ssm_a": "self_attn.A_log=", "ssm_dt": "self_attn.dt_bias="},
    "ssm_norm": "self_attn.o_norm",
}
_INDEXER_NAMES = {
    **{"indexer.attn_q_b": "self_attn.indexer.wq_b", "indexer.attn_k": "self_attn.indexer.wk"},
    **{"indexer.k_norm": "self_attn.indexer.k_norm", "indexer.proj": "self_attn.indexer.weights_proj"},
}
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


def _norms_of_residuals(reader: ConfigReader) -> Values:
    """Norms of residuals are ones: the file has them in the projections."""
    places = [f"layers.{i}.{name}" for i in range(reader.num_layers) for name in _RESIDUALS]
    for place in (*places, "output_attn_res"):
        reader.small_tensors[f"model.{place}_norm.weight"] = np.ones(reader.hidden_size, np.float32)
    return {}


def _indexer_types(reader: ConfigReader) -> Values:
    listed = reader.keys.for_layers("attention.indexer.types", reader.num_layers)
    return {} if listed is None else {"indexer_types": ["full" if each else "shared" for each in listed]}


GGUFS = (
    GGUF(
        ("glm5-next", "glm5_next", "Glm5NextForConditionalGeneration"),
        (
            [LATENT_ATTENTION, ROUTED_EXPERTS, experts("n_routed_experts"), SHARED_COUNT, DENSE_FIRST],
            [PREDICTION_LAYERS, Fact(_delta_layers), INDEXER, Fact(_indexer_types), STREAMS, SINKHORN, SWIGLU_LIMIT],
            key("linear_lower_bound", "kda.gate_lower_bound", None, float),
            key("index_kpool", "attention.indexer.kpool"),
            [only("attention.indexer.kpool_select_tail", True), only("expert_gating_func", SIGMOID)],
            only("attention.layer_norm_epsilon", 1e-6),  # of the indexer
        ),
        GGUFNames(
            {
                **LATENT_NAMES,
                **_INDEXER_NAMES,
                **_DELTA_NAMES,
                **{name: f"{name}=" for name in CONNECTIONS},
                **each("gate ape", "indexer_compressor_{}", "self_attn.indexer.index_kpool_compress_{}="),
            },
            renames=((".model.", ".model.language_model."),),
        ),
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
        GGUFNames(
            {
                **LATENT_NAMES,
                **_DELTA_NAMES,
                **{"ssm_g": "self_attn.g_proj", "attn_gate": "self_attn.g_proj"},
                **{"attn_res_score": "self_attention_res_proj", "ffn_res_score": "mlp_res_proj"},
                # The block of experts has a name of its own.
                **each("gate up down", "ffn_{}_shexp", "block_sparse_moe.shared_experts.{}_proj"),
                **each("down up", "ffn_routed_{}", "block_sparse_moe.routed_expert_{}_proj"),
                "ffn_routed_norm": "block_sparse_moe.routed_expert_norm",
                "ffn_gate_inp": "block_sparse_moe.gate",
                "exp_probs_b": "block_sparse_moe.gate.e_score_correction_bias=",
            },
            top_level={"output_res_score": "model.output_attn_res_proj"},
            experts="block_sparse_moe.experts",
            projections=W1_W3_W2,
            renames=(),
        ),
    ),
    GGUF(
        ("hy_v4", "hy_v4", "HYV4ForCausalLM"),
        (
            [LATENT_ATTENTION, ROUTED_EXPERTS, experts("n_routed_experts"), SHARED_COUNT, DENSE_FIRST],
            [INDEXER, Fact(_indexer_types), STREAMS, only("expert_gating_func", SIGMOID)],
            key("hc_magnitude", "hyper_connection.magnitude", kind=float),
            key("swiglu_limit", "swiglu_clamp_exp", 0.0, float),
        ),
        GGUFNames(
            LATENT_NAMES
            | _INDEXER_NAMES
            | CONNECTIONS
            | {"attn_gate": "self_attn.gate_proj", "attn_sinks": "self_attn.sinks="},
            top_level=CONNECTION_OF_OUTPUT,
        ),
    ),
)
