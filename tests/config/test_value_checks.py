import pytest

from jaxis.config.hf_config import HFConfig
from jaxis.config.value_checks import check_values
from jaxis.errors import ConfigError
from tests.support import published_configs


@pytest.mark.parametrize("value", [0, -1, 2.0, 1e300, "8", True, [8], {"a": 8}, 2**31])
@pytest.mark.parametrize("wrap", [dict, lambda values: {"text_config": values}])
def test_a_size_that_cannot_be_one_is_named(value, wrap):
    config = HFConfig(wrap({"hidden_size": 64, "num_attention_heads": value}), source="a/config.json")
    with pytest.raises(
        ConfigError, match=r"a/config\.json has (text_config\.)?num_attention_heads=.* an integer of at least 1"
    ):
        check_values(config)


def test_sizes_that_are_right_missing_or_null():
    config = HFConfig({"hidden_size": 64, "head_dim": None, "num_experts": 0, "text_config": {"vocab_size": 5}})
    check_values(config)
    assert config.unread_keys() == ["hidden_size", "num_experts", "text_config"], "checking is not reading"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("num_hidden_layers", 10**9, "an integer of at least 1 and at most 1024"),
        ("hidden_size", 10**9, "an integer of at least 1 and at most 16777216"),
        ("max_position_embeddings", "big", "an integer of at least 1"),
        ("max_position_embeddings", -64, "an integer of at least 1"),
        ("sliding_window", 2.5, "an integer"),
        ("rms_norm_eps", "small", "a number"),
        ("rms_norm_eps", float("inf"), "a number"),
        ("rope_theta", 10**30, "a number"),
        ("rope_theta", True, "a number"),
        ("tie_word_embeddings", "yes", "true or false"),
        ("hidden_act", 7, "a string"),
        ("hidden_act", "x" * 10_000, "a string"),
        ("layer_types", "full_attention", "a list"),
        ("rope_scaling", [1], "an object"),
        ("quantization_config", "int8", "an object"),
        ("text_config", 3, "an object"),
        ("model_type", ["qwen3"], "a string"),
        ("dtype", 16, "a string"),
        ("eos_token_id", "</s>", "an integer or a list of integers"),
        ("eos_token_id", [1, 2.5], "an integer or a list of integers"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(key, value, expected):
    values = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", key: value}
    with pytest.raises(ConfigError) as error:
        check_values(HFConfig(values, source="a/config.json"))
    message = str(error.value)
    assert message.startswith(f"a/config.json has {key}=")
    assert f"expected {expected}" in message
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize("published", [value for value in vars(published_configs).values() if isinstance(value, dict)])
def test_published_values_are_right(published):
    if "architectures" in published:
        check_values(HFConfig(published))
