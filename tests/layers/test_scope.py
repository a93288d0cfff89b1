"""LayerScope: what a layer is made from."""

import dataclasses

import jax.numpy as jnp
import pytest

from jaxis.layers.leaves import linear
from tests.layers.layer_scopes import scope_of


def test_children_have_dotted_names():
    scope = scope_of({})
    assert (scope / "model").prefix == "model"
    assert (scope / "model" / "norm").prefix == "model.norm"
    assert scope.prefix == "", "a child does not change its parent"


def test_a_decoder_layers_children_know_its_index():
    layer = (scope_of({}) / "model").layer(3)
    assert (layer.prefix, layer.layer_index) == ("model.layers.3", 3)
    assert ((layer / "mlp").prefix, (layer / "mlp").layer_index) == ("model.layers.3.mlp", 3)


def test_gives_the_models_config_and_cannot_be_changed():
    scope = scope_of({"hidden_size": 8}, dtype=jnp.bfloat16)
    assert (scope.config["hidden_size"], scope.dtype, scope.max_model_len) == (8, jnp.bfloat16, 2048)
    with pytest.raises(dataclasses.FrozenInstanceError):
        scope.prefix = "other"


def test_a_leaf_asks_for_its_method_by_the_scopes_name():
    asked = []

    class Asked:
        def get_quant_method(self, layer, prefix):
            asked.append(prefix)

    layer = linear(scope_of({}, quant_config=Asked(), dtype=jnp.bfloat16) / "mlp" / "up_proj", 4, 6, axes=(None, None))
    assert asked == ["mlp.up_proj"]
    assert layer.weight.get_value().shape == (6, 4)
    assert layer.weight.get_value().dtype == jnp.bfloat16
    assert layer.bias is None
