"""LFM2, with and without experts."""

from __future__ import annotations

from jaxis.loading.gguf.common_facts import BASE, DENSE, EXPERT_WIDTH, SIGMOID, experts
from jaxis.loading.gguf.config_reader import FULL
from jaxis.loading.gguf.rope_keys import rope
from jaxis.loading.gguf.table import GGUF, Fact, constant, has, key, only
from jaxis.loading.gguf.tensor_names import W1_W3_W2, GGUFNames, each

_BLOCK = each("conv in_proj out_proj", "shortconv.{}", "conv.{}")
_LFM2 = (
    [BASE, rope(1_000_000.0), DENSE],
    key("norm_eps", "attention.layer_norm_rms_epsilon", kind=float),
    Fact(lambda reader: {"layer_types": [FULL if heads else "conv" for heads in reader.kv_heads()]}),
    key("conv_L_cache", "shortconv.l_cache"),
    has("conv_bias", "shortconv.in_proj.bias"),
)

GGUFS = (
    # The file has the width itself.
    GGUF(
        ("lfm2", "lfm2", "Lfm2ForCausalLM"),
        (_LFM2, constant("block_auto_adjust_ff_dim", False)),
        GGUFNames(_BLOCK),
    ),
    GGUF(
        ("lfm2moe", "lfm2_moe", "Lfm2MoeForCausalLM"),
        (
            [_LFM2, experts("num_experts"), EXPERT_WIDTH, has("use_expert_bias", "exp_probs_b.bias")],
            only("expert_gating_func", SIGMOID),
            only("expert_weights_norm", True),
            key("num_dense_layers", "leading_dense_block_count", 0),
            key("routed_scaling_factor", "expert_weights_scale", 1.0, float),
        ),
        GGUFNames(_BLOCK, projections=W1_W3_W2),
    ),
)
