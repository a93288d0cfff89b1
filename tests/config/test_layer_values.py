"""Settings that config.json lists layer by layer."""

import pytest

from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_settings import settings_of_layer, value_of_layer
from jaxis.errors import ConfigError


def config(**values):
    return HFConfig({"num_hidden_layers": 3, **values})


def test_a_layer_has_its_entry_and_lists_may_go_on_past_the_model():
    assert [value_of_layer(config(limits=[1, None, 3, 4]), "limits", i) for i in range(3)] == [1, None, 3]
    assert value_of_layer(config(), "limits", 0) is None


@pytest.mark.parametrize("limits", [[1, 2], 7, "1,2,3"])
def test_what_is_no_list_of_all_layers_is_refused(limits):
    with pytest.raises(ConfigError, match=r"has limits=.*, expected a list of 3 entries"):
        value_of_layer(config(limits=limits), "limits", 0)


def test_a_layer_may_have_settings_of_its_own():
    by_layer = config(per_layer_config={"01": {"head_dim": 8}})
    assert [settings_of_layer(by_layer, i).to_dict() for i in range(3)] == [{}, {"head_dim": 8}, {}]
    assert settings_of_layer(config(), 1).to_dict() == {}
    with pytest.raises(ConfigError, match="per_layer_config"):
        settings_of_layer(config(per_layer_config={"all": {}}), 0)
