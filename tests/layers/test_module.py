"""Names of parameters and modules, however a module holds its children."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import DeferredRngs, JaxModule, UnusedRngs, initialize, named_parameters


def linear(use_bias: bool = False) -> JaxLinear:
    return JaxLinear(2, 2, nnx.Rngs(0), use_bias=use_bias)


class Nest(JaxModule):
    def __init__(self):
        self.plain = linear(use_bias=True)
        self.absent = None
        self.listed = [linear(), None, linear()]
        self.tupled = (linear(),)
        self.keyed = {"a": linear(), "b": [{"deep": linear()}]}
        self.nnx_listed = nnx.List([linear()])
        self.nnx_keyed = nnx.Dict(key=linear())
        self.scale = nnx.Param(jnp.ones(2))
        self.parts = [nnx.Param(jnp.ones(1)), nnx.Param(jnp.ones(1))]
        self.number, self.array, self._hidden = 3, jnp.ones(2), linear()


MODULES = [
    "plain",
    "listed.0",
    "listed.2",
    "tupled.0",
    "keyed.a",
    "keyed.b.0.deep",
    "nnx_listed.0",
    "nnx_keyed.key",
]
PARAMETERS = [
    "plain.weight",
    "plain.bias",
    *(f"{name}.weight" for name in MODULES[1:]),
    "scale",
    "parts.0",
    "parts.1",
]


def test_children_are_named_through_every_container():
    assert [name for name, _ in Nest().named_children()] == [*MODULES, "scale", "parts.0", "parts.1"]


def test_parameters_are_named_through_every_container():
    nest = Nest()
    named = dict(nest.named_parameters())
    assert list(named) == PARAMETERS
    assert named["keyed.b.0.deep.weight"] is nest.keyed["b"][0]["deep"].weight


def test_modules_begin_with_the_module_itself():
    nest = Nest()
    named = dict(nest.named_modules())
    assert list(named) == ["", *MODULES]
    assert named[""] is nest
    assert named["listed.2"] is nest.listed[2]


def test_a_prefix_goes_before_every_name():
    assert [name for name, _ in Nest().named_parameters("model")] == [f"model.{name}" for name in PARAMETERS]
    assert next(iter(Nest().named_modules("model")))[0] == "model"


def test_every_parameter_is_part_of_the_nnx_state():
    nest = Nest()
    # The hidden one is nnx's too.
    assert len(nnx.to_flat_state(nnx.state(nest, nnx.Param))) == len(PARAMETERS) + 1


def test_splitting_and_merging_keeps_names_and_values():
    nest = Nest()
    merged = nnx.merge(*nnx.split(nest))
    merged_parameters = dict(merged.named_parameters())
    assert sorted(merged_parameters) == sorted(PARAMETERS)
    for name, param in nest.named_parameters():
        assert (param[...] == merged_parameters[name][...]).all()


def test_the_keys_say_when_initial_values_are_made():
    at_once, deferred = linear(use_bias=True), JaxLinear(2, 2, DeferredRngs(0), use_bias=True)
    for (_, made), (_, param) in zip(named_parameters(at_once), named_parameters(deferred), strict=True):
        assert isinstance(param.get_value(), jax.ShapeDtypeStruct)
        initialize(param)
        np.testing.assert_array_equal(param[...], made[...])
    assert not any(param[...].any() for _, param in named_parameters(JaxLinear(2, 2, UnusedRngs(0))))
