"""Ling: names of tensors in checkpoints, whose writers differ; 2.5: kinds of layers, states of lightning attention."""

import pytest

from jaxis import LLM, SamplingParams
from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.layers.checkpoint_names import CheckpointNames
from jaxis.layers.lightning_attention import LightningAttention
from jaxis.models.bailing_hybrid import BailingHybridForCausalLM
from jaxis.models.model_loader import construct_abstractly
from tests.support import parity

# Keys and sizes of attention are those of tests of programs that serve the model, other sizes those of Ling 1T.
LING_2_5 = {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "model_type": "bailing_hybrid",
    **{"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 64},
    **{"head_dim": 128, "partial_rotary_factor": 0.5, "rotary_dim": 64, "layer_group_size": 8, "group_norm_size": 8},
    **{"use_qk_norm": True, "use_qkv_bias": False, "use_bias": False, "rope_theta": 6000000, "rope_scaling": None},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"num_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True},
    **{"moe_intermediate_size": 2048, "intermediate_size": 18432, "first_k_dense_replace": 4, "num_shared_experts": 1},
    **{"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "routed_scaling_factor": 2.5},
    **{"rope_interleave": True, "num_nextn_predict_layers": 1, "hidden_act": "silu", "router_dtype": "fp32"},
    **{"vocab_size": 157184, "rms_norm_eps": 1e-06, "max_position_embeddings": 131072, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("name", ["attention.dense", "attention.o_proj"])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_last_projection_of_attention_is_one_tensor_under_both_names(name, layer):
    config = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "layer_group_size": 2}
    renames = BailingHybridForCausalLM.all_renames(_Config(config))
    names = CheckpointNames(renames, BailingHybridForCausalLM.other_names)
    assert names.name_here(f"model.layers.{layer}.{name}.weight") == f"model.layers.{layer}.self_attn.o_proj.weight"
    written = "dense" if layer == 1 else "o_proj"
    assert names.name_in_checkpoint(f"model.layers.{layer}.self_attn.o_proj.weight") == (
        f"model.layers.{layer}.attention.{written}.weight"
    )


class _Config(dict):
    """Keys of config.json that `all_renames` reads."""


def construct(**changes):
    return construct_abstractly(VllmConfig(ModelConfig("x", HFConfig({**LING_2_5, **changes}), max_model_len=4096)))


def test_layers_of_2_5_have_lightning_attention_but_the_last_of_each_group_and_those_after_all_groups():
    layers = construct(num_hidden_layers=7, layer_group_size=3).model.layers
    is_linear = [isinstance(layer.self_attn, LightningAttention) for layer in layers]
    assert is_linear == [True, True, False, True, True, False, False]


def test_states_of_2_5_decay_as_in_the_makers_code():
    layers = construct().model.layers
    rates = {i: layers[i].self_attn.rates for i in (0, 1, 78)}
    for i, share in ((0, 80 / 79), (1, 1.0), (78, 2 / 79)):
        assert rates[i][0] == pytest.approx(2**-0.125 * (share + 1e-5), rel=1e-6)
        assert rates[i][63] == pytest.approx(2**-8 * (share + 1e-5), rel=1e-6)


@pytest.mark.parametrize("key", ["linear_silu", "use_qkv_bias", "use_bias", "attention_bias"])
def test_what_2_5_does_not_implement_is_refused_by_name(key):
    with pytest.raises(ConfigError, match=key):
        construct(num_hidden_layers=8, **{key: True})


def test_drafts_change_no_token_of_a_model_with_states_of_lightning_attention():
    family = next(f for f in parity.FAMILIES if f.name == "Ling 2.5")
    tokens, found = parity.prompt(9) * 4, []
    for drafts in (None, {"method": "ngram", "num_speculative_tokens": 4}):
        options = {"dtype": "float32", "kv_cache_memory": "4MiB", "max_model_len": 128, "show_progress": False}
        with LLM(parity.checkpoint_folder(family), speculative_config=drafts, **options) as llm:
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            [output] = llm.generate({"prompt_token_ids": tokens}, params)
        found.append(output.outputs[0].token_ids)
    assert found[0] == found[1] == parity.reference_greedy_tokens(family, tokens, 40)
