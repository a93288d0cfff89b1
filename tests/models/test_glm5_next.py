"""GLM-5.3-Flash: its keys as published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.layers.delta_attention import DeltaAttention
from jaxis.layers.sparse_mla import SparseLatentAttention
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.parallel.mesh import make_mesh
from tests.support import parity

FAMILY = next(family for family in parity.FAMILIES if family.name == "GLM-5.3-Flash")
LAYERS = 4
# The published file's keys, with lists for fewer layers.
TEXT = {
    **{"model_type": "glm5_next_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 154880, "hidden_act": "silu"},
    **{"rms_norm_eps": 1e-5, "max_position_embeddings": 1048576, "tie_word_embeddings": False, "head_dim": 0},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256},
    **{"mla_use_nope": True, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "index_kpool": 4},
    **{"index_kpool_compress": True, "index_kpool_always_select_tail": True, "indexer_rope_interleave": True},
    **{"index_share_for_mtp_iteration": True, "indexer_types": ["full"] * LAYERS, "attention_bias": False},
    "linear_attn_config": {
        **{"num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0},
        **{"kda_layers": [0, 1, 2], "full_attn_layers": [3]},
    },
    "layer_types": ["linear_attention"] * 3 + ["deepseek_sparse_attention"],
    **{"mlp_layer_types": ["dense"] * 3 + ["sparse"], "first_k_dense_replace": 3, "mhc": True, "hc_mult": 4},
    **{"hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "n_routed_experts": 288, "num_experts_per_tok": 8},
    **{"n_shared_experts": 1, "moe_intermediate_size": 2048, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "swiglu_limit": 10.0},
    **{"num_nextn_predict_layers": 1, "moe_router_dtype": "float32"},
}


def construct(**changes):
    config = {"architectures": ["Glm5NextForConditionalGeneration"], "text_config": TEXT | changes}
    return construct_abstractly(VllmConfig(ModelConfig("published", HFConfig(config), max_model_len=4096)))


def test_the_published_keys_make_layers_of_both_kinds():
    mixers = [layer.self_attn for layer in construct().model.layers]
    assert [type(mixer) for mixer in mixers] == [DeltaAttention] * 3 + [SparseLatentAttention]
    sizes = mixers[3].indexer.sizes
    assert (sizes.group_size, sizes.num_groups, sizes.num_selected) == (4, 512, 2051)


@pytest.mark.parametrize("key", ["index_kpool_compress", "index_kpool_always_select_tail", "mhc", "mla_use_nope"])
def test_what_no_published_model_has_is_refused_by_name(key):
    with pytest.raises(ConfigError, match=f"{key}=False"):
        construct(**{key: False})


def test_published_keys_of_linear_attention_give_the_bits_of_transformers_own(tmp_path):
    source = Path(parity.checkpoint_folder(FAMILY))
    config = json.loads((source / "config.json").read_text())
    text = config["text_config"]
    text["linear_attn_config"] = {
        "num_heads": text.pop("linear_num_heads"),
        "head_dim": text.pop("linear_head_dim"),
        "short_conv_kernel_size": text.pop("linear_conv_kernel_dim"),
        "gate_lower_bound": text.pop("linear_lower_bound"),
        "safe_gate": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "model.safetensors", tmp_path)
    settings = ModelConfig(str(tmp_path), HFConfig.from_folder(tmp_path), dtype=jnp.float32, max_model_len=1024)
    models = load_model(VllmConfig(settings), make_mesh()), parity.loaded_model(FAMILY)
    published, own = (parity.run_model(model, (17,))[17][0] for model in models)
    np.testing.assert_array_equal(published, own)
