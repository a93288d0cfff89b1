"""Keys that config.json files have under several names."""

import pytest

from jaxis.config.checkpoint_values import value_of_either
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError

NAMES = ("moe_top_k", "num_experts_per_tok", "top_k")


@pytest.mark.parametrize("values", [{"moe_top_k": 8}, {"top_k": 8}, {"num_experts_per_tok": 8, "top_k": 8}])
def test_any_of_the_names_or_several_give_the_value(values):
    config = HFConfig(dict.fromkeys(NAMES) | values)
    assert value_of_either(config, *NAMES) == 8
    assert config.unread_keys() == []
    assert {use.key for use in config.key_uses() if use.use == "used"} >= {next(iter(values))}


def test_names_that_contradict_each_other_are_an_error():
    with pytest.raises(ConfigError, match="top_k=4, of which only 8 is supported"):
        value_of_either(HFConfig({"moe_top_k": 8, "top_k": 4}), *NAMES)


def test_a_missing_key_is_the_error_of_any_missing_key():
    with pytest.raises(ConfigError, match=r"has no 'moe_top_k', which the model needs: .*hf_overrides"):
        value_of_either(HFConfig({}), *NAMES)


def test_a_number_that_an_unread_name_repeats_is_not_unread():
    config = HFConfig({"model_type": "qwen3_moe", "num_experts": 64, "n_routed_experts": 64, "moe_topk": 4})
    assert config["num_experts"] == 64
    assert config.unread_keys() == ["moe_topk"]


def test_a_number_that_contradicts_what_was_read_is_unread():
    config = HFConfig({"model_type": "qwen3_moe", "num_experts": 64, "n_routed_experts": 32})
    assert config["num_experts"] == 64
    assert config.unread_keys() == ["n_routed_experts"]
