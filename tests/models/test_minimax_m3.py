"""MiniMax M3: keys and names as published, contexts that are selected whole, the planner, refusals."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxis.bringup.verify.compare import relative_error
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.layers.kv_cache_spec import KVCacheSpec
from jaxis.layers.selected_attention import SelectedAttention, SelectedKVCacheSpec
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.parallel.mesh import make_mesh
from tests.support import parity
from tests.support.paged_sequences import PagedSequence, PagedSequences

FAMILY = next(family for family in parity.FAMILIES if family.name == "MiniMax M3")
LAYERS = 5
# The published file's keys, with lists for fewer layers.
PUBLISHED = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "model_type": "minimax_m3_vl",
    **{"image_token_index": 200025, "video_token_index": 200026, "vision_feature_layer": -1},
    **{"vision_config": {"hidden_size": 1280, "model_type": "clip_vision_model"}},
    "vision_feature_select_strategy": "full",
    "text_config": {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        **{"hidden_size": 6144, "intermediate_size": 3072, "num_hidden_layers": LAYERS, "num_attention_heads": 64},
        **{"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 200064, "max_position_embeddings": 1048576},
        **{"rms_norm_eps": 1e-06, "use_gemma_norm": True, "attention_output_gate": False, "rope_theta": 5000000},
        **{"rotary_dim": 64, "partial_rotary_factor": 0.5, "hidden_act": "swigluoai", "use_qk_norm": True},
        **{"tie_word_embeddings": False, "dense_intermediate_size": 12288, "shared_intermediate_size": 3072},
        **{"num_local_experts": 128, "num_experts_per_tok": 4, "n_shared_experts": 1, "scoring_func": "sigmoid"},
        **{"use_routing_bias": True, "moe_layer_freq": [0, 0, 0, 1, 1], "qk_norm_type": "per_head"},
        **{"num_mtp_modules": 7, "num_nextn_predict_layers": 1, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        "routed_scaling_factor": 2.0,
        "sparse_attention_config": {
            **{"use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 4},
            **{"sparse_topk_blocks": 16, "sparse_block_size": 128, "sparse_disable_index_value": [0, 0, 0, 1, 1]},
            **{"sparse_score_type": "max", "sparse_init_block": 0, "sparse_local_block": 1},
            "sparse_attention_freq": [0, 0, 0, 1, 1],
        },
    },
}


def construct(sparse=None, **changes):
    config = copy.deepcopy(PUBLISHED)
    config["text_config"].update(changes)
    config["text_config"]["sparse_attention_config"].update(sparse or {})
    return construct_abstractly(VllmConfig(ModelConfig("published", HFConfig(config), max_model_len=4096)))


def load(folder, **settings):
    config = ModelConfig(str(folder), HFConfig.from_folder(folder), dtype=jnp.float32, **settings)
    return load_model(VllmConfig(config), make_mesh())


def test_the_published_keys_make_sparse_layers_where_the_lists_say():
    layers = construct().model.layers
    assert [isinstance(layer.self_attn, SelectedAttention) for layer in layers] == [False] * 3 + [True] * 2
    specs = layers[3].self_attn.kv_cache_spec, layers[3].self_attn.indexer.key_cache.kv_cache_spec
    assert specs[0] == SelectedKVCacheSpec(4, 128, num_heads=64, num_selected=2048)
    assert [spec.layout(128, jnp.bfloat16).block_bytes for spec in specs] == [2 * 128 * 8 * 128, 2 * 128 * 128]
    assert layers[0].mlp.down_proj.input_size == 12288
    every = construct({"sparse_attention_freq": [1] * LAYERS, "sparse_disable_index_value": [1] * LAYERS})
    assert all(isinstance(layer.self_attn, SelectedAttention) for layer in every.model.layers)


@pytest.mark.parametrize(
    ("sparse", "changes", "message"),
    [
        ({"sparse_init_block": 1}, {}, "sparse_init_block=1"),
        ({"sparse_local_block": 2}, {}, "sparse_local_block=2"),
        ({"sparse_num_index_heads": 2}, {}, "sparse_num_index_heads=2"),
        ({"sparse_disable_index_value": [0] * LAYERS}, {}, "sparse_disable_index_value"),
        ({"sparse_attention_freq": [0]}, {}, "sparse_attention_freq"),
        ({}, {"moe_layer_freq": [0, 1]}, "moe_layer_freq"),
        ({}, {"attention_output_gate": True}, "attention_output_gate=True"),
        ({}, {"qk_norm_type": "per_layer"}, "qk_norm_type"),
    ],
    ids=str,
)
def test_what_no_published_model_has_is_refused_by_name(sparse, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        construct(sparse, **changes)
    assert "\n" not in str(caught.value)


def test_published_spellings_give_the_bits_of_transformers_own(tmp_path):
    source = Path(parity.checkpoint_folder(FAMILY))
    assert any("block_sparse_moe.experts.0.w1" in name for name in load_file(source / "model.safetensors"))
    assert "language_model.model.layers.1.self_attn.index_q_proj.weight" in load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    text = config["text_config"]
    names = {"index_n_heads": "sparse_num_index_heads", "index_head_dim": "sparse_index_dim"}
    names |= {"index_block_size": "sparse_block_size", "index_topk_blocks": "sparse_topk_blocks"}
    text["sparse_attention_config"] = {name: text.pop(key) for key, name in names.items()}
    text["sparse_attention_config"]["sparse_attention_freq"] = [0, 1, 1]
    text["moe_layer_freq"] = [0, 1, 1]
    del text["layer_types"], text["mlp_layer_types"], text["rope_parameters"]
    text["rope_theta"] = 5_000_000.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "model.safetensors", tmp_path)
    logits = [
        parity.run_model(each, (17,))[17][0]
        for each in (load(tmp_path, max_model_len=1024), parity.loaded_model(FAMILY))
    ]
    np.testing.assert_array_equal(*logits)


def test_an_engine_for_contexts_that_are_selected_whole_has_dense_attention_and_no_index_keys():
    model = load(parity.checkpoint_folder(FAMILY), max_model_len=12)
    assert model.decoder.cache_entries == ((0,), (1,), (2,))
    assert model.model.layers[1].self_attn.kv_cache_spec == KVCacheSpec(2, 32, num_heads=4)
    paged, sequence, tokens = PagedSequences(model), PagedSequence(), parity.prompt(17)[:12]
    logits = [paged.step([(sequence, part)], pad_tokens=16, pad_requests=2)[0] for part in (tokens[:11], tokens[11:])]
    assert relative_error(np.concatenate(logits), parity.reference_run(FAMILY, 17)[0][:12]) < 1e-5
