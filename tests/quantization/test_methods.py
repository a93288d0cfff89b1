"""Layers that hold quantized weights: as they load, look rows up, multiply, and run on several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxis.errors import CheckpointError, ConfigError
from jaxis.kernels.weights import CodedWeight, QuantizedWeight, WeightScheme, quantize
from jaxis.layers.embed import JaxEmbed, JaxLmHead
from jaxis.layers.linear import JaxLinear
from jaxis.layers.weight_loader import JaxAutoWeightsLoader
from jaxis.quantization.arguments import parse_quantization
from tests.support.dequantized import dequantize
from tests.support.quantized_models import load, logits, values

SCHEMES = {
    "int8": {"weight_qtype": "int8"},
    "int8 in groups": {"weight_qtype": "int8", "tile_size": 32},
    "int4": {"weight_qtype": "int4", "tile_size": 32, "weight_calibration_method": "mse"},
    "int4 with zero points": {"weight_qtype": "int4", "tile_size": 32, "weight_calibration_method": "minmax"},
}


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def config(scheme, **more):
    return parse_quantization([{"module_path": ".*"} | SCHEMES[scheme] | more])


def quantized(scheme, weight):
    rule = config(scheme).rules[0]
    return quantize(weight, WeightScheme(rule.weight_qtype, rule.tile_size, rule.weight_calibration_method))


@pytest.mark.parametrize("scheme", SCHEMES)
class TestLayers:
    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_embeddings_and_tied_head(self, scheme, dtype):
        layer = JaxEmbed(11, 64, nnx.Rngs(0), dtype=dtype, quant_config=config(scheme))
        weight, x = random(11, 64), random(3, 64, seed=1)
        JaxAutoWeightsLoader(layer).load_weights([("weight", weight)])
        table = np.asarray(dequantize(quantized(scheme, weight)))
        ids = np.array([0, 10, 3, 3])
        np.testing.assert_array_equal(layer(ids), table[ids].astype(dtype))
        assert layer(ids).dtype == dtype
        logits = layer.decode(jnp.asarray(x, dtype))
        assert logits.dtype == jnp.float32
        expected = np.asarray(jnp.asarray(x, dtype), np.float32) @ table.T
        tolerance = 1e-5 if dtype == jnp.float32 else 0.01
        np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance * np.abs(expected).max())

    def test_initial_weights_are_quantized_too(self, scheme):
        head = JaxLmHead(64, 11, nnx.Rngs(0), quant_config=config(scheme))
        plain = JaxLmHead(64, 11, nnx.Rngs(0))
        error = np.asarray(dequantize(head.weight.get_value()) - plain.weight[...])
        assert 0 < np.abs(error).max() < 0.2 * np.abs(plain.weight[...]).max()

    def test_a_wrong_shape_names_both_sides(self, scheme):
        layer = JaxLinear(64, 6, nnx.Rngs(0), use_bias=False, quant_config=config(scheme), prefix="x")
        layer.weight.set_value(jax.ShapeDtypeStruct((6, 64), jnp.float32))
        with pytest.raises(CheckpointError, match=r"'weight' has shape \[5, 64\] in the checkpoint, \[6, 64\]"):
            JaxAutoWeightsLoader(layer).load_weights([("weight", random(5, 64))])

    def test_a_weight_that_is_not_finite_is_named(self, scheme):
        layer = JaxLinear(64, 6, nnx.Rngs(0), use_bias=False, quant_config=config(scheme), prefix="x")
        weight = random(6, 64)
        weight[3, 3] = np.nan
        with pytest.raises(CheckpointError, match="'weight' has values that are not finite"):
            JaxAutoWeightsLoader(layer).load_weights([("weight", weight)])


def test_activations_are_quantized_where_the_rule_says_so():
    x, weight = random(3, 64, seed=2), random(6, 64)
    results = []
    for act_qtype in (None, "int8"):
        layer = JaxLinear(64, 6, nnx.Rngs(0), use_bias=False, quant_config=config("int8", act_qtype=act_qtype))
        JaxAutoWeightsLoader(layer).load_weights([("weight", weight)])
        results.append(np.asarray(layer(x)))
    difference = np.abs(results[0] - results[1]).max() / np.abs(results[0]).max()
    assert 1e-4 < difference < 0.02


def test_rules_reach_every_module_with_a_weight_matrix(checkpoint):
    plain = {n for n, value in values(load(checkpoint(), "int8")).items() if not isinstance(value, QuantizedWeight)}
    assert plain == {name for name in values(load(checkpoint())) if "norm" in name}


def test_excluded_modules_keep_their_type(checkpoint):
    rules = [
        {"module_path": r".*\.layers\.0\..*|lm_head|.*embed_tokens"},
        {"module_path": ".*", "weight_qtype": "int8"},
    ]
    held = values(load(checkpoint(), rules))
    assert {name for name, value in held.items() if isinstance(value, QuantizedWeight)} == {
        name for name in held if ".layers.1." in name and "norm" not in name
    }


@pytest.mark.slow
def test_dummy_weights_are_quantized(checkpoint):
    held = values(load(checkpoint(), "int4", load_format="dummy"))
    assert isinstance(held["model.layers.0.mlp.up_proj.weight"], CodedWeight)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(held))
    assert np.isfinite(logits(load(checkpoint(), "int4", load_format="dummy"))).all()


def test_the_engine_serves_a_quantized_model(start_llm):
    ids = list(range(3, 60))
    rules = [{"module_path": ".*", "weight_qtype": "int8", "act_qtype": "int8"}]
    with start_llm(additional_config={"quantization": {"qwix": {"rules": rules}}}) as llm:
        whole, paged = (llm.compute_logits(ids, path=path) for path in ("whole", "paged"))
        model = llm.engine.runner.model
        assert llm.weight_bytes == sum(value.nbytes for value in values(model).values())
    # An activation on the edge between two integers may fall to either side.
    np.testing.assert_allclose(whole, paged, rtol=0, atol=0.01 * np.abs(paged).max())


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ([{"module_path": "model.q_proj", "weight_qtype": "int8"}], "applies to no module"),
        ([{"module_path": ".*", "weight_qtype": "int4", "tile_size": 40}], "model.embed_tokens has 64 input features"),
        ("w8a8", "quantization='w8a8' is neither"),
    ],
)
def test_mistakes_show_before_weights_are_read(start_llm, quantization, message):
    with pytest.raises(ConfigError, match=message):
        start_llm(quantization=quantization)
