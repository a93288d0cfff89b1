"""config.json files as makers spell them and as transformers saves them make the same models."""

import pytest
from flax import nnx

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.models.model_loader import construct_abstractly

SIZES = {
    **{"vocab_size": 31, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"head_dim": 24, "max_position_embeddings": 256, "moe_intermediate_size": 16, "hidden_act": "silu"},
}
KINDS = ["full_attention", "sliding_attention", "sliding_attention"]
MLP_KINDS = ["dense", "dense", "sparse"]
MIMO = SIZES | {
    **{"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "num_key_value_heads": 1},
    **{"v_head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "attention_value_scale": 0.6},
}
STEP = SIZES | {
    **{"architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "rms_norm_eps": 1e-4, "sliding_window": 8},
    **{"share_expert_dim": 24, "num_nextn_predict_layers": 1, "moe_router_scaling_factor": 3.0},
}
SPELLINGS = {
    "MiMo V2 Flash": (
        MIMO
        | {
            **{"hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 0, 1], "layernorm_epsilon": 1e-4},
            **{"rope_theta": 1e6, "swa_rope_theta": 2e4, "partial_rotary_factor": 0.5, "routed_scaling_factor": None},
            **{"sliding_window": 8, "sliding_window_size": 8, "attention_chunk_size": 8, "n_shared_experts": None},
            **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 24, "swa_v_head_dim": 16},
            **{"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False},
        },
        MIMO
        | {
            **{"layer_types": KINDS, "mlp_layer_types": MLP_KINDS, "rms_norm_eps": 1e-4, "sliding_window": 9},
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "Step 3.5": (
        STEP
        | {
            **{"num_attention_groups": 2, "moe_num_experts": 6, "moe_top_k": 2, "moe_layers_enum": "2,3"},
            **{"layer_types": [*KINDS, "full_attention"], "rope_theta": [1e6, 2e4, 2e4, 1e6]},
            **{"partial_rotary_factors": [0.5, 1.0, 1.0, 0.5], "yarn_only_types": ["full_attention"]},
            **{"swiglu_limits": [0.0, 0.0, 7, 7], "swiglu_limits_shared": [0.0, 16, 16, 0.0]},
            "rope_scaling": {
                **{"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0},
                "original_max_position_embeddings": 64,
            },
            "attention_other_setting": {
                **{"attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 2},
                **{"head_dim": 24, "true_head_dim": 24},
            },
        },
        STEP
        | {
            **{"num_key_value_heads": 2, "n_routed_experts": 6, "num_experts_per_tok": 2, "mlp_layer_types": MLP_KINDS},
            **{"layer_types": KINDS, "swiglu_limits": [0, 0, 7], "swiglu_limits_shared": [0, 16, 16]},
            **{"num_sliding_attention_heads": 6, "per_layer_config": {"1": {"num_attention_heads": 6}}},
            **{"query_pre_attn_scalar": 24, "mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["sparse"]},
            "rope_parameters": {
                "full_attention": {
                    **{"rope_type": "llama3", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "factor": 2.0},
                    **{"low_freq_factor": 1.0, "high_freq_factor": 32.0, "original_max_position_embeddings": 64},
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 1.0},
            },
        },
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_both_spellings_are_one_model(name):
    graphs = []
    for values in SPELLINGS[name]:
        config = HFConfig(values)
        model = construct_abstractly(VllmConfig(ModelConfig("it", config, max_model_len=128)))
        assert config.unread_keys() == []
        graphs.append(nnx.graphdef(model))
    assert graphs[0] == graphs[1]
    spans = [layer.self_attn.span.sliding_window for layer in model.decoder.layers]
    assert spans == [None, *({"MiMo V2 Flash": 9, "Step 3.5": 8}[name],) * 2]
