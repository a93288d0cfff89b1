"""Layers with packed weights: what is kept in memory, and that they compute what plain layers do."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxis.kernels import native
from jaxis.kernels.weights import PackedWeight, QuantizedWeight, WeightScheme, quantize
from jaxis.layers.embed import JaxEmbed
from jaxis.layers.linear import JaxLinear, apply_together
from jaxis.layers.weight_loader import JaxAutoWeightsLoader
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.wrappers import PackingConfig
from tests.support.dequantized import dequantize

pytestmark = pytest.mark.skipif(not native.usable(), reason="needs the native kernels")

PLAIN = PackingConfig()


def quantized(qtype, tile_size):
    return PackingConfig(parse_quantization([{"module_path": ".*", "weight_qtype": qtype, "tile_size": tile_size}]))


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def filled(layer, seed=0):
    """The layer as a checkpoint leaves it, and its weights by name."""
    weights = {
        name: random(*param.get_value().shape, seed=seed + i)
        for i, (name, param) in enumerate(layer.named_parameters())
    }
    assert JaxAutoWeightsLoader(layer).load_weights(weights.items()) == weights.keys()
    process(layer)
    return layer, weights


def process(layer):
    for _, module in layer.named_modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)


def linear(n, config=PLAIN, *, use_bias=False, seed=0, name="x"):
    layer = JaxLinear(64, n, nnx.Rngs(0), use_bias=use_bias, quant_config=config, prefix=name)
    return filled(layer, seed)


def test_bfloat16_weights_stay_as_in_the_file():
    layer = JaxEmbed(33, 48, nnx.Rngs(0), dtype=jnp.bfloat16, quant_config=PLAIN)
    weight = random(33, 48).astype(ml_dtypes.bfloat16)
    JaxAutoWeightsLoader(layer).load_weights([("weight", weight)])
    process(layer)
    held = layer.weight.get_value()
    assert isinstance(held, PackedWeight)
    assert held.storage == "bfloat16"
    x = random(3, 48, seed=1)
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(layer.decode(jnp.asarray(x)), exact, rtol=0, atol=1e-5 * np.abs(exact).max())
    np.testing.assert_array_equal(layer(np.array([5, 32, 0])), weight[[5, 32, 0]])


def test_a_float32_layer_keeps_the_type_of_a_bfloat16_file():
    layer = JaxLinear(64, 9, nnx.Rngs(0), use_bias=False, quant_config=PLAIN)
    weight = random(9, 64).astype(ml_dtypes.bfloat16)
    JaxAutoWeightsLoader(layer).load_weights([("weight", weight)])
    process(layer)
    assert layer.weight.get_value().storage == "bfloat16"
    x = random(2, 64, seed=1)
    np.testing.assert_allclose(layer(jnp.asarray(x)), x @ weight.astype(np.float32).T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("use_bias", [False, True])
def test_layers_applied_together_are_each_alone(use_bias):
    layers = [linear(n, use_bias=use_bias, seed=n) for n in (64, 7, 33)]
    x = random(5, 64)
    together = nnx.jit(lambda layers, x: apply_together(x, *layers))([layer for layer, _ in layers], jnp.asarray(x))
    for (layer, weights), y in zip(layers, together, strict=True):
        np.testing.assert_array_equal(y, nnx.jit(lambda layer, x: layer(x))(layer, jnp.asarray(x)))
        np.testing.assert_allclose(y, x @ weights["weight"].T + weights.get("bias", 0), rtol=0, atol=1e-4)


def test_groups_that_the_kernels_do_not_have_stay_with_plain_jax():
    layer, weights = linear(9, quantized("int4", 16))
    assert isinstance(layer.weight.get_value(), QuantizedWeight)
    x = random(3, 64, seed=1)
    expected = x @ np.asarray(dequantize(quantize(weights["weight"], WeightScheme("int4", 16)))).T
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=0, atol=1e-4)
