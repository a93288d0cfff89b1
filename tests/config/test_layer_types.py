"""Layer types against those that transformers' own config classes make of the same config.json."""

import pytest
from transformers import Cohere2Config, Gemma2Config, Gemma3TextConfig, Olmo3Config

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, layer_span, layer_type, uniform_span
from jaxis.errors import ConfigError

KINDS = [SLIDING_ATTENTION, FULL_ATTENTION, FULL_ATTENTION]


@pytest.mark.parametrize(
    ("config_class", "full_every"), [(Gemma2Config, 2), (Gemma3TextConfig, 6), (Olmo3Config, 4), (Cohere2Config, 4)]
)
@pytest.mark.parametrize("values", [{}, {"layer_types": [FULL_ATTENTION] * 3 + [SLIDING_ATTENTION] * 9}])
def test_types_are_those_that_transformers_reads(config_class, full_every, values):
    expected = config_class(num_hidden_layers=12, **values).layer_types
    assert [layer_type(HFConfig(values), i, full_every=full_every) for i in range(12)] == expected


@pytest.mark.parametrize("key", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_a_pattern_in_config_json_comes_before_the_familys(key):
    config = HFConfig({key: 3})
    assert [layer_type(config, i, full_every=6) for i in range(6)] == [*[SLIDING_ATTENTION] * 2, FULL_ATTENTION] * 2
    both = HFConfig({key: 2, "layer_types": KINDS})
    assert [layer_type(both, i, full_every=6) for i in range(3)] == KINDS
    assert both.unread_keys() == []


@pytest.mark.parametrize("types", [[FULL_ATTENTION], [FULL_ATTENTION, "linear_attention"]])
def test_a_type_that_is_missing_or_unknown_is_refused(types):
    with pytest.raises(ConfigError, match=r"layer_types\[1\]=.* expected 'full_attention' or 'sliding_attention'"):
        layer_type(HFConfig({"layer_types": types}), 1, full_every=4)


def test_windows_belong_to_sliding_layers():
    window = HFConfig({"sliding_window": 9})
    assert layer_span(window, FULL_ATTENTION, default_window=4096) == FULL_CONTEXT
    assert window.unread_keys() == []
    assert layer_span(window, SLIDING_ATTENTION, default_window=4096) == AttentionSpan(9)
    assert layer_span(HFConfig({}), SLIDING_ATTENTION, default_window=4096) == AttentionSpan(4096)
    assert layer_span(HFConfig({"sliding_window": None}), SLIDING_ATTENTION, default_window=4096) == FULL_CONTEXT


@pytest.mark.parametrize("window", [None, 9])
def test_a_family_with_one_kind_of_layers_accepts_a_list_of_that_kind(window):
    kind, other = (FULL_ATTENTION, SLIDING_ATTENTION) if window is None else (SLIDING_ATTENTION, FULL_ATTENTION)
    for values in ({}, {"layer_types": [kind] * 3}):
        config = HFConfig(values)
        assert uniform_span(config, window) == AttentionSpan(window)
        assert config.unread_keys() == []
    with pytest.raises(ConfigError, match=f"layer_types in .* has '{other}', expected '{kind}' of all layers"):
        uniform_span(HFConfig({"layer_types": [kind, other]}), window)


@pytest.mark.parametrize("types", [5, "full_attention", {"0": "full_attention"}])
def test_layer_types_that_are_no_list_are_refused(types):
    config = HFConfig({"layer_types": types})
    for read in (lambda: uniform_span(config, None), lambda: layer_type(config, 0, full_every=4)):
        with pytest.raises(ConfigError, match=r"layer_types=.*expected a list"):
            read()


@pytest.mark.parametrize("pattern", ["LLLG", 0, True])
def test_a_pattern_that_is_no_number_is_refused(pattern):
    with pytest.raises(ConfigError, match=r"sliding_window_pattern=.* expected an integer of at least 1"):
        layer_type(HFConfig({"sliding_window_pattern": pattern}), 0, full_every=4)
