"""Quantization methods that are not jaxis' own, as models written by the development guides bring them."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.layers.linear import JaxLinear, apply_together
from jaxis.layers.mlp import GatedMLP
from jaxis.layers.scope import LayerScope
from jaxis.layers.weight_loader import JaxAutoWeightsLoader
from jaxis.quantization.wrappers import PackingConfig


class HalvesMethod:
    """Two parameters of its own, which only it can multiply by; one is made when all is loaded."""

    def create_weights(self, layer, rngs, dtype):
        shape = (layer.output_size, layer.input_size)
        layer.weight_half = nnx.Param(jnp.zeros(shape, dtype))
        layer.weight_factor = nnx.Param(jnp.zeros((layer.output_size, 1), dtype))

    def process_weights_after_loading(self, layer):
        layer.weight_factor.set_value(2 * layer.weight_factor[...])

    def apply(self, layer, x, *, preferred_element_type=None):
        y = x @ (layer.weight_half[...] * layer.weight_factor[...]).T
        return y if preferred_element_type is None else y.astype(preferred_element_type)


class HalvesConfig:
    def get_quant_method(self, layer, prefix):
        return HalvesMethod() if prefix.endswith(("up_proj", "gate_proj")) else None

    def check_all_used(self):
        pass


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def loaded(layer):
    weights = {
        name: random(*param.get_value().shape, seed=seed) for seed, (name, param) in enumerate(layer.named_parameters())
    }
    assert JaxAutoWeightsLoader(layer).load_weights(weights.items()) == weights.keys()
    for _, module in layer.named_modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)
    return layer, weights


def dense(weights, name):
    return 2 * weights[f"{name}weight_half"] * weights[f"{name}weight_factor"]


def test_a_method_that_multiplies_is_asked_to():
    layer, weights = loaded(JaxLinear(16, 6, nnx.Rngs(0), quant_config=HalvesConfig(), prefix="up_proj"))
    x = random(3, 16, seed=9)
    expected = x @ dense(weights, "").T + weights["bias"]
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-5)
    for y in apply_together(jnp.asarray(x), layer, layer):
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_it_stands_beside_layers_that_are_packed():
    hf_config = HFConfig({"hidden_size": 32, "intermediate_size": 64, "hidden_act": "silu"})
    config = VllmConfig(ModelConfig("", hf_config))
    layer, weights = loaded(GatedMLP(LayerScope(config, nnx.Rngs(0), PackingConfig(HalvesConfig()), "mlp")))
    x = random(3, 32, seed=9)
    hidden = jax.nn.silu(x @ dense(weights, "gate_proj.").T) * (x @ dense(weights, "up_proj.").T)
    np.testing.assert_allclose(layer(jnp.asarray(x)), hidden @ weights["down_proj.weight"].T, rtol=1e-4, atol=1e-3)
