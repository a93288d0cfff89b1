import pytest

from jaxis.config.hf_config import HFConfig
from jaxis.config.sizes import check_sizes
from jaxis.errors import ConfigError


@pytest.mark.parametrize("value", [0, -1, 2.0, 1e300, "8", True, [8], {"a": 8}, 2**31])
@pytest.mark.parametrize("wrap", [dict, lambda values: {"text_config": values}])
def test_a_size_that_cannot_be_one_is_named(value, wrap):
    config = HFConfig(wrap({"hidden_size": 64, "num_attention_heads": value}), source="a/config.json")
    with pytest.raises(ConfigError, match=r"a/config\.json has num_attention_heads=.* an integer of at least 1"):
        check_sizes(config)


def test_sizes_that_are_right_missing_or_null():
    config = HFConfig({"hidden_size": 64, "head_dim": None, "num_experts": 0, "text_config": {"vocab_size": 5}})
    check_sizes(config)
    assert config.unread_keys() == ["hidden_size", "num_experts", "text_config"], "checking is not reading"
