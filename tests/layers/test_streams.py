"""Residual streams against transformers' modules, and the same bits for any number of tokens."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperHead
from transformers.models.hy_v4.configuration_hy_v4 import HYV4Config
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection, HYV4HyperHead
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual

from jaxis.kernels.weights import pack
from jaxis.layers.linear import JaxLinear
from jaxis.layers.module import JaxModule, named_modules
from jaxis.layers.streams import GatedConnection, GatedMixer, HyperConnection, HyperMixer, StreamMean
from jaxis.layers.weight_loader import JaxAutoWeightsLoader
from tests.layers.layer_scopes import in_one_program, scope_of
from tests.layers.test_group_indexer import randomized

STREAMS, HIDDEN, RANK, EPSILON, MAGNITUDE = 4, 24, 10, 1e-3, 1.7
V4 = DeepseekV4Config(hidden_size=HIDDEN, hc_mult=STREAMS, hc_eps=EPSILON, hc_sinkhorn_iters=7)
HY4 = HYV4Config(hidden_size=HIDDEN, hc_mult=STREAMS, hc_eps=EPSILON, hc_magnitude=MAGNITUDE)
QWEN4 = Qwen4ExpTextConfig(hidden_size=HIDDEN, hc_count=STREAMS, hc_lowrank=RANK)


def scope(config):
    return scope_of({"hidden_size": HIDDEN, "rms_norm_eps": config.rms_norm_eps})


def loaded(layer, module):
    """The layer with the module's weights, which are not near their initial values."""
    renames = {"fn": "fn.weight", "hc_fn": "fn.weight", "hc_base": "base", "hc_scale": "scale"}
    weights = {renames.get(name, name): value.numpy() for name, value in randomized(module).state_dict().items()}
    assert JaxAutoWeightsLoader(layer).load_weights(weights.items()) == weights.keys()
    return layer


def v4():
    module = DeepseekV4HyperConnection(V4)
    return loaded(HyperConnection(scope(V4), STREAMS, epsilon=EPSILON, sinkhorn_iterations=7), module), module


def hy4():
    module = HYV4HyperConnection(HY4)
    options = {"magnitude": MAGNITUDE, "epsilon": EPSILON, "write_epsilon": EPSILON}
    return loaded(HyperConnection(scope(HY4), STREAMS, sinkhorn_iterations=None, **options), module), module


def qwen4():
    module = Qwen4ExpTextGatedResidual(QWEN4)
    return loaded(GatedConnection(scope(QWEN4), STREAMS, RANK), module), module


def reference(module, x, y):
    """The block's input, and the streams after its output, as the references' decoder layers compute them."""
    if isinstance(module, DeepseekV4HyperConnection):
        post, comb, read = module(x)
        kept = torch.matmul(comb.transpose(-1, -2), x)
    elif isinstance(module, HYV4HyperConnection):
        post, read = module(x)
        kept = x
    else:
        read, _, post = module(x.flatten(2))
        kept = x
    return read, post[..., None] * y[..., None, :] + kept


def inputs(num_tokens):
    rng = np.random.default_rng(0)
    x = 3 * rng.standard_normal((num_tokens, STREAMS, HIDDEN), np.float32)
    return x, rng.standard_normal((num_tokens, HIDDEN), np.float32)


class Block(JaxModule):
    """Reads x, and writes y as if it were the block's output."""

    def __init__(self, connection):
        self.connection = connection

    def __call__(self, x, y):
        read, update = self.connection(x)
        return read, update.into(x, y)


@pytest.mark.parametrize("make", [v4, hy4, qwen4])
def test_connections_read_and_write_as_transformers_does(make):
    connection, module = make()
    x, y = inputs(9)
    with torch.no_grad():
        expected = reference(module, torch.tensor(x)[None], torch.tensor(y)[None])
    for found, wanted in zip(in_one_program(Block(connection), x, y), expected, strict=True):
        np.testing.assert_allclose(found, wanted[0], rtol=1e-6, atol=2e-6)


def ends():
    v4, hy4, qwen4 = DeepseekV4HyperHead(V4), HYV4HyperHead(HY4), Qwen4ExpTextGatedResidual(QWEN4, use_combine=False)
    yield loaded(HyperMixer(scope(V4), STREAMS, epsilon=EPSILON), v4), v4
    yield loaded(HyperMixer(scope(HY4), STREAMS, epsilon=EPSILON), hy4), hy4
    yield loaded(GatedMixer(scope(QWEN4), STREAMS, RANK), qwen4), lambda x: qwen4(x.flatten(2))
    yield StreamMean(), Glm5NextTextHyperHead()


def test_streams_end_as_in_transformers():
    x, _ = inputs(9)
    for mixer, module in ends():
        with torch.no_grad():
            expected = module(torch.tensor(x)[None])[0]
        np.testing.assert_allclose(in_one_program(mixer, x), expected, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("make", [v4, hy4, qwen4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_tokens_streams_are_bit_identical_regardless_of_the_other_tokens(make, dtype):
    block = Block(make()[0])
    for _, module in named_modules(block):
        if isinstance(module, JaxLinear):
            module.weight.set_value(pack(np.asarray(module.weight.get_value())))
    x, y = (jnp.asarray(each, dtype) for each in inputs(19))
    alone = [in_one_program(block, x[i : i + 1], y[i : i + 1]) for i in (0, 7, 18)]
    for size in (2, 8, 19):
        together = in_one_program(block, x[:size], y[:size])
        for i, expected in zip((0, 7, 18), alone, strict=True):
            for found, wanted in zip(together, expected, strict=True):
                assert i >= size or np.array_equal(found[i], wanted[0])
