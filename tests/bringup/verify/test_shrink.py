"""Tiny twins: small, and with every feature of the model at work."""

import copy

import pytest

from jaxis.bringup.verify.shrink import tiny_twin
from jaxis.errors import ConfigError
from tests.bringup.verify.verified_models import published
from tests.support import published_configs

PUBLISHED = {
    name: value for name, value in vars(published_configs).items() if isinstance(value, dict) and name.isupper()
}
SIZES = {"num_hidden_layers": 24, "num_attention_heads": 32, "hidden_size": 4096}


def twin(**settings):
    return tiny_twin(SIZES | settings)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_twin_is_small_and_spelled_as_the_original(name):
    config = copy.deepcopy(PUBLISHED[name])
    shrunk = tiny_twin(config)
    assert config == PUBLISHED[name]
    text, original = shrunk.get("text_config", shrunk), config.get("text_config", config)
    assert text["num_hidden_layers"] <= 12
    assert text["hidden_size"] == 64
    dropped = {"quantization_config", "auto_map", "_name_or_path", "_commit_hash"}
    assert set(text) - set(original) <= {"moe_layers", "mlp_only_layers"}
    assert set(original) - set(text) <= dropped
    for key, value in text.items():  # what is no size stays
        if isinstance(value, bool | str):
            assert value == original[key]


def test_keys_that_only_the_family_spells_so_keep_their_names():
    """transformers' OPT knows no intermediate_size: the twin would have its default."""
    config = published("opt-350m")
    shrunk = tiny_twin(config)
    assert set(shrunk) == set(config)
    assert shrunk["ffn_dim"] == 96


@pytest.mark.parametrize("heads", [(32, 32), (32, 8), (32, 1), (64, 8)])
def test_query_heads_share_as_they_did(heads):
    shrunk = twin(num_attention_heads=heads[0], num_key_value_heads=heads[1])
    few, many = shrunk["num_key_value_heads"], shrunk["num_attention_heads"]
    assert many % few == 0
    assert (few == many) == (heads[0] == heads[1])
    assert (few == 1) == (heads[1] == 1)


@pytest.mark.parametrize(("head_dim", "usual"), [(128, True), (64, False)])
def test_a_head_that_is_no_share_of_the_hidden_size_stays_so(head_dim, usual):
    shrunk = twin(head_dim=head_dim)
    assert (shrunk["head_dim"] * shrunk["num_attention_heads"] == shrunk["hidden_size"]) == usual


def test_two_layers_of_each_type_in_the_order_of_the_model():
    types = ["sliding_attention"] * 5 + ["full_attention"]
    assert twin(layer_types=types * 4)["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert twin(layer_types=["full_attention"] * 24)["num_hidden_layers"] == 2


def test_layers_at_the_end_that_share_a_cache_stay_with_layers_that_have_it():
    types = ["sliding_attention"] * 4 + ["full_attention"]
    shrunk = twin(num_hidden_layers=35, layer_types=types * 7, num_kv_shared_layers=20)
    assert shrunk["num_kv_shared_layers"] == shrunk["num_hidden_layers"] // 2 == 4
    assert set(shrunk["layer_types"][:4]) == set(shrunk["layer_types"][4:]) == set(types)


def test_what_is_0_stays_0():
    for size, shrunk in ((0, 0), (256, 16)):
        twin_of_gemma = twin(architectures=["Gemma4ForCausalLM"], hidden_size_per_layer_input=size)
        assert twin_of_gemma["hidden_size_per_layer_input"] == shrunk


def test_sizes_that_only_the_family_has():
    delta_net = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128}
    text = tiny_twin({"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": SIZES | delta_net})
    shrunk = text["text_config"]
    assert shrunk["linear_num_value_heads"] // shrunk["linear_num_key_heads"] == 2
    assert shrunk["linear_num_value_heads"] * shrunk["linear_value_head_dim"] < 100
    lfm = twin(architectures=["Lfm2ForCausalLM"], block_dim=1024, conv_dim=1024)
    assert lfm["block_dim"] == lfm["conv_dim"] == lfm["hidden_size"]
    mamba = {"mamba_n_heads": 48, "mamba_d_head": 32, "mamba_expand": 2}
    granite = twin(architectures=["GraniteMoeHybridForCausalLM"], **mamba)
    assert granite["mamba_n_heads"] * granite["mamba_d_head"] == 2 * granite["hidden_size"]
    assert twin(architectures=["BambaForCausalLM"], mamba_d_head="auto")["mamba_d_head"] == "auto"
    assert twin(linear_num_key_heads=16)["linear_num_key_heads"] == 16, "of no family"


def test_a_period_of_windows():
    shrunk = twin(sliding_window_pattern=6, sliding_window=512)
    assert (shrunk["sliding_window_pattern"], shrunk["num_hidden_layers"]) == (2, 4)
    assert shrunk["sliding_window"] < 17


def test_the_first_layers_without_a_window():
    shrunk = twin(use_sliding_window=True, max_window_layers=20, sliding_window=32768)
    assert (shrunk["max_window_layers"], shrunk["num_hidden_layers"]) == (2, 4)


@pytest.mark.parametrize("dense", [1, 3])
def test_dense_layers_before_sparse_ones(dense):
    shrunk = twin(first_k_dense_replace=dense, n_routed_experts=256)
    assert (shrunk["first_k_dense_replace"], shrunk["num_hidden_layers"], shrunk["n_routed_experts"]) == (2, 4, 8)


def test_sparse_layers_by_a_period_or_a_list():
    shrunk = twin(decoder_sparse_step=2, mlp_only_layers=[], num_experts=60)
    assert shrunk["decoder_sparse_step"] == 1
    assert len(shrunk["mlp_only_layers"]) == 2
    assert shrunk["num_hidden_layers"] == 4
    assert len(twin(mlp_only_layers=[3], decoder_sparse_step=1)["mlp_only_layers"]) == 2


def test_every_combination_of_kinds_that_the_model_has():
    """Llama 4: no rope in every fourth layer, experts in every second, so never a dense layer without rope."""
    shrunk = twin(no_rope_layers=[], interleave_moe_layer_step=2, attention_chunk_size=8192)
    kinds = [(rope, i in shrunk["moe_layers"]) for i, rope in enumerate(shrunk["no_rope_layers"])]
    assert sorted(set(kinds)) == [(0, True), (1, False), (1, True)]
    assert all(kinds.count(kind) == 2 for kind in kinds)
    assert shrunk["attention_chunk_size"] < 17


@pytest.mark.parametrize(("groups", "allowed", "expected"), [(8, 4, (4, 2)), (8, 3, (4, 2)), (1, 1, (1, 1))])
def test_experts_in_groups(groups, allowed, expected):
    shrunk = twin(n_routed_experts=256, n_group=groups, topk_group=allowed, num_experts_per_tok=8)
    assert (shrunk["n_group"], shrunk["topk_group"]) == expected
    # All that a token takes must fit in the groups that it may take them from.
    assert shrunk["num_experts_per_tok"] <= shrunk["n_routed_experts"] // shrunk["n_group"] * shrunk["topk_group"]
    assert twin(num_local_experts=16, num_experts_per_tok=1)["num_experts_per_tok"] == 1


def test_ropes_change_within_the_prompts():
    llama3 = {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}
    assert twin(rope_scaling=llama3)["rope_scaling"]["original_max_position_embeddings"] == 128
    nested = twin(rope_parameters={"full_attention": llama3, "sliding_attention": {"rope_type": "default"}})
    assert nested["rope_parameters"]["full_attention"]["original_max_position_embeddings"] == 128
    dynamic = twin(rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=4096)
    assert dynamic["max_position_embeddings"] == 128


def test_frequency_factors_fit_the_head():
    factors = [float(i) for i in range(48)]
    shrunk = twin(
        hidden_size=3072,
        rope_scaling={"type": "longrope", "short_factor": factors, "long_factor": factors[::-1]},
        original_max_position_embeddings=4096,
        partial_rotary_factor=0.75,
    )
    assert shrunk["rope_scaling"]["short_factor"] == [0.0, 8.0, 16.0, 24.0, 32.0, 40.0]
    assert shrunk["rope_scaling"]["long_factor"] == [47.0, 39.0, 31.0, 23.0, 15.0, 7.0]
    assert shrunk["original_max_position_embeddings"] == 128


def test_kinds_of_layers_that_only_the_family_knows():
    """Layer types that a config leaves to the family follow from a layer's number: the first layers stay."""
    types = ["sliding_attention", "full_attention"] * 12
    shrunk = tiny_twin(SIZES, SIZES | {"layer_types": types, "sliding_window": 4096})
    assert (shrunk["num_hidden_layers"], shrunk["sliding_window"]) == (4, 11)
    assert "layer_types" not in shrunk
    no_rope = [1, 1, 1, 0] * 6
    llama4 = {"interleave_moe_layer_step": 2, "attention_chunk_size": 8192}
    shrunk = tiny_twin(SIZES | llama4, SIZES | llama4 | {"no_rope_layers": no_rope, "floor_scale": 8192})
    assert shrunk["num_hidden_layers"] == 8
    assert shrunk["moe_layers"] == [1, 3, 5, 7]
    every = {"no_rope_layers": no_rope, "moe_layers": list(range(24))}
    assert tiny_twin(SIZES, SIZES | every)["num_hidden_layers"] == 8
    assert shrunk["floor_scale"] < 17
    said = {"sliding_window_pattern": 6, "sliding_window": 512}
    derived = (["sliding_attention"] * 5 + ["full_attention"]) * 4
    assert tiny_twin(SIZES | said, SIZES | said | {"layer_types": derived})["num_hidden_layers"] == 4


def test_periods_of_layers_of_another_kind():
    periods = {"attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1}
    twin = tiny_twin({"num_hidden_layers": 32, "num_attention_heads": 4, "num_experts": 16, **periods})
    assert twin["num_hidden_layers"] == 13, "the second layer of attention is number 12"
    assert {key: twin[key] for key in periods} == periods


def test_parts_that_are_not_run_are_small_too():
    vision = {"hidden_size": 1408, "num_hidden_layers": 34, "image_size": 336, "vision_output_dim": 7680}
    config = {"text_config": SIZES}
    shrunk = tiny_twin(config, {"text_config": SIZES, "vision_config": vision})
    small = {"hidden_size": 64, "num_hidden_layers": 1, "image_size": 64, "vision_output_dim": 64}
    assert shrunk["vision_config"] == small
    assert shrunk["text_config"]["hidden_size"] == 64


def test_a_config_without_layers_is_refused():
    with pytest.raises(ConfigError, match="num_hidden_layers=None"):
        tiny_twin({"num_attention_heads": 4})
