import pytest

from jaxis.config.key_rules import judge
from jaxis.config.neutral_keys import COMPUTATION_WORDS, NEUTRAL_WORDS, SYNONYMS
from jaxis.config.reference import keys_of_other_families


def use(key, value, model_type="llama", **others):
    return judge(key, value, model_type, {key: value, **others}.get).use


@pytest.mark.parametrize("key", ["unsloth_version", "_name_or_path", "auto_map", "transformers.js_config", "n_ctx"])
@pytest.mark.parametrize("model_type", ["llama", "never_heard_of", None])
def test_stamps_of_tools_are_ignored_whatever_the_model(key, model_type):
    assert use(key, {"a": 1}, model_type) == "ignored"


@pytest.mark.parametrize(
    "key", ["transformers_version", "eos_token_id", "image_token_index", "attn_pdrop", "max_grad_norm", "temperature"]
)
def test_training_and_bookkeeping_and_token_ids_are_neutral(key):
    assert use(key, 5) == "neutral"


@pytest.mark.parametrize("key", ["use_flash_attention_2", "_flash_attn_2_enabled", "use_fused_mlp"])
def test_how_the_same_result_is_computed_is_neutral(key):
    assert use(key, True) == "neutral"


def test_a_key_that_the_reference_reads_is_an_error_and_for_another_family_another_one():
    verdict = judge("mlp_only_layers", [1], "qwen3_moe", {}.get)
    assert (verdict.use, verdict.because) == ("unread", "the reference reads it")
    verdict = judge("mlp_only_layers", [1], "llama", {}.get)
    assert (verdict.use, verdict.because) == ("unread", "models of other families compute with it")


@pytest.mark.parametrize("key", ["qkv_bias", "shared_expert_intermediate_size", "rope_interleaved", "qk_layernorms"])
@pytest.mark.parametrize("off", [False, 0, 0.0, "", [], {}])
def test_what_is_off_changes_nothing(key, off):
    assert use(key, off) == "neutral"


@pytest.mark.parametrize("key", ["qkv_bias", "shared_expert_intermediate_size", "rope_interleaved", "qk_layernorms"])
@pytest.mark.parametrize("on", [True, 1, "yes", [0], {"a": 1}])
def test_what_is_on_and_sounds_like_a_computation_is_an_error(key, on):
    assert use(key, on) == "unread"


def test_a_factor_is_off_at_one_and_not_at_zero():
    assert use("residual_multiplier", 1.0) == use("logits_scaling", 1) == "neutral"
    assert use("residual_multiplier", 0.0) == use("residual_multiplier", True) == "unread"
    # Granite's is in place of 1 / sqrt(head_dim).
    assert use("attention_multiplier", 1.0) == "unread"


def test_what_no_model_can_leave_out_is_neutral_only_if_it_is_on():
    assert use("scale_attn_weights", True) == use("is_causal", True) == "neutral"
    assert use("scale_attn_weights", False) == use("is_causal", False) == use("use_rope", False) == "unread"


def test_another_name_with_the_same_value_says_nothing_new():
    assert use("n_layer", 32, num_hidden_layers=32) == "neutral"
    assert use("n_layer", 32, num_hidden_layers=31) == "unread"
    assert use("activation", "swiglu", hidden_act="silu") == "neutral"
    assert use("activation", "swiglu", hidden_act="gelu") == "unread"
    assert use("layer_norm_epsilon", 1e-5, "starcoder2", norm_epsilon=1e-5) == "neutral"
    # What the reference assumes where the file has no attention_bias.
    assert use("use_qkv_bias", False) == "neutral"
    assert use("num_experts", 8, "mixtral", num_local_experts=8) == "neutral"
    assert use("num_local_experts", 8, "qwen3_moe", num_experts=8) == "neutral"
    assert use("num_experts", 8, "mixtral", num_local_experts=4) == "unread"


def test_numbers_are_not_truth_values():
    assert use("is_encoder_decoder", 0) == "unread"
    assert use("n_layer", True, num_hidden_layers=1) == "unread"


def test_layer_types_that_are_all_full_attention_are_those_of_a_model_without_the_key():
    assert use("layer_types", ["full_attention"] * 3) == "neutral"
    assert use("layer_types", ["full_attention", "sliding_attention"]) == "unread"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("is_llama_config", True, "ignored"),
        ("merge_recipe", {"base": "a"}, "ignored"),
        ("autoround_version", "0.5", "ignored"),
        ("use_turbo", False, "neutral"),
        ("use_turbo", True, "unread"),
        ("spectralNormGain", 2.0, "unread"),
        ("rope2", "spiral", "unread"),
        ("dual_chunk_attention_config", {"chunk_size": 5}, "unread"),
    ],
)
def test_a_key_that_no_code_reads_is_ignored_unless_its_name_is_that_of_a_computation(key, value, expected):
    assert key not in keys_of_other_families()
    assert use(key, value) == expected


@pytest.mark.parametrize("model_type", [None, "never_heard_of", 5])
def test_without_a_reference_every_unknown_key_is_an_error(model_type):
    assert use("zeta_power", 2, model_type) == use("is_llama_config", True, model_type) == "unread"
    assert use("attention_dropout", 0.1, model_type) == "neutral"


def test_the_tables_do_not_contradict_each_other():
    assert COMPUTATION_WORDS.isdisjoint(NEUTRAL_WORDS)
    for key, names in SYNONYMS.items():
        assert set(names) - {key}, key
