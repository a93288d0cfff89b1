"""Latent attention: plain, packed and quantized weights, whole sequences and the cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxis.kernels import native
from jaxis.kernels.weights import WeightScheme, dequantize, quantize
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.latent_projection import LatentUpProjection
from jaxis.layers.mla import LatentAttentionSizes, LatentCacheSpec, MultiHeadLatentAttention
from jaxis.layers.rope import RotaryEmbedding
from jaxis.layers.weight_loader import JaxAutoWeightsLoader
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.wrappers import PackingConfig
from tests.layers.layer_scopes import in_one_program, scope_of

needs_native = pytest.mark.skipif(not native.usable(), reason="needs the native kernels")
SIZES = LatentAttentionSizes(
    hidden_size=48,
    num_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=12,
    qk_rope_head_dim=16,
    v_head_dim=20,
)
INT8 = [{"module_path": ".*kv_b_proj", "weight_qtype": "int8"}]
LENGTH, BLOCK_SIZE = 20, 8


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make_attention(quant_config=None, *, dtype=jnp.float32, weights_dtype=np.float32):
    attention = MultiHeadLatentAttention(
        scope_of({}, dtype=dtype, quant_config=quant_config, prefix="self_attn"),
        SIZES,
        rope=RotaryEmbedding(tuple(0.5 ** np.arange(8)), interleaved=True),
        scale=0.2,
        use_bias=True,
    )
    weights = {
        name: 0.3 * random(*param.get_value().shape, seed=i)
        for i, (name, param) in enumerate(attention.named_parameters())
    }
    weights = {name: weight.astype(weights_dtype) for name, weight in weights.items()}
    assert JaxAutoWeightsLoader(attention).load_weights(weights.items()) == weights.keys()
    for _, module in attention.named_modules():
        if hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)
    attention.kv_b_proj.after_loading()
    return attention, weights


def whole(attention, x):
    return in_one_program(attention, None, x, AttentionMetadata.for_whole_sequences([len(x)]))[1]


def paged(attention, x, chunks):
    """The outputs of a sequence that comes in chunks."""
    layout = attention.kv_cache_spec.layout(BLOCK_SIZE, jnp.float32)
    cache = layout.cache(jnp.full((4, *layout.shape), jnp.nan))
    graph, state = nnx.split(attention)
    run = jax.jit(lambda state, *operands: nnx.merge(graph, state)(*operands), donate_argnums=1)
    outputs, start = [], 0
    for size in chunks:
        end = start + size
        metadata = AttentionMetadata(
            jnp.arange(start, end),
            jnp.asarray([[2, 1, 3]]),
            jnp.asarray([end]),
            jnp.asarray([0, size]),
            jnp.asarray([int(size == 1), 1, 1]),
        )
        cache, out = run(state, cache, x[start:end], metadata)
        outputs.append(out)
        start = end
    return jnp.concatenate(outputs)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "config",
    [
        None,
        pytest.param(PackingConfig(), marks=needs_native),
        pytest.param(PackingConfig(parse_quantization(INT8)), marks=needs_native),
    ],
    ids=["plain", "native", "native int8"],
)
@pytest.mark.parametrize(
    "weights_dtype",
    [np.float32, pytest.param(ml_dtypes.bfloat16, marks=pytest.mark.slow)],
    ids=["float32", "bfloat16"],
)
def test_absorbed_attention_over_latents_equals_that_to_keys_and_values(config, weights_dtype):
    attention, _ = make_attention(config, weights_dtype=weights_dtype)
    x = jnp.asarray(random(LENGTH, SIZES.hidden_size, seed=99))
    expected = whole(attention, x)
    np.testing.assert_allclose(paged(attention, x, [11, 1, 8]), expected, rtol=0, atol=1e-5 * jnp.abs(expected).max())


class TestUpProjection:
    H, L, N, V = 3, 16, 8, 5

    def filled(self, weight, quant_config=None, dtype=jnp.float32):
        layer = LatentUpProjection(
            self.H,
            self.L,
            self.N,
            self.V,
            nnx.Rngs(0),
            dtype=dtype,
            quant_config=quant_config,
            prefix="layers.0.kv_b_proj",
        )
        JaxAutoWeightsLoader(layer).load_weights([("weight", weight)])
        layer.quant_method.process_weights_after_loading(layer)
        layer.after_loading()
        return layer

    def weight(self):
        return random(self.H * (self.N + self.V), self.L)

    def check(self, layer, weight, atol=1e-5):
        heads = weight.astype(np.float64).reshape(self.H, self.N + self.V, self.L)
        latents, queries = random(7, self.L, seed=1), random(7, self.H, self.N, seed=2)
        of_heads = random(7, self.H, self.L, seed=3)
        keys, values = layer.keys_and_values(jnp.asarray(latents))
        np.testing.assert_allclose(keys, np.einsum("tl,hnl->thn", latents, heads[:, : self.N]), rtol=0, atol=atol)
        np.testing.assert_allclose(values, np.einsum("tl,hvl->thv", latents, heads[:, self.N :]), rtol=0, atol=atol)
        np.testing.assert_allclose(
            layer.absorb_into_queries(jnp.asarray(queries)),
            np.einsum("thn,hnl->thl", queries, heads[:, : self.N]),
            rtol=0,
            atol=atol,
        )
        np.testing.assert_allclose(
            layer.values_of(jnp.asarray(of_heads)),
            np.einsum("thl,hvl->thv", of_heads, heads[:, self.N :]),
            rtol=0,
            atol=atol,
        )

    @pytest.mark.parametrize("config", [None, pytest.param(PackingConfig(), marks=needs_native)])
    def test_its_products_are_those_of_the_heads_matrices(self, config):
        weight = self.weight()
        self.check(self.filled(weight, config), weight)

    @needs_native
    def test_bfloat16_stays_bfloat16_in_a_float32_model(self):
        weight = self.weight().astype(ml_dtypes.bfloat16)
        layer = self.filled(weight, PackingConfig())
        assert layer.key_weight.get_value().storage == layer.value_weight.get_value().storage == "bfloat16"
        assert [name for name, _ in layer.named_parameters()] == ["key_weight", "value_weight"]
        self.check(layer, weight)

    @pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=needs_native)])
    def test_a_quantized_weight_is_dequantized_to_the_numbers_it_stands_for(self, is_native):
        rules = parse_quantization(INT8)
        weight = self.weight()
        layer = self.filled(weight, PackingConfig(rules) if is_native else rules)
        self.check(layer, np.asarray(dequantize(quantize(weight, WeightScheme("int8", None)), jnp.float32)))

    @needs_native
    @pytest.mark.parametrize(("act_qtype", "atol"), [(None, 5e-5), ("int8", 0.3)])
    def test_heads_of_whole_panels_without_keys_keep_a_quantized_weight(self, act_qtype, atol):
        self.N, self.V, self.L = 0, 64, 96
        weight, x = self.weight(), jnp.asarray(random(7, self.H, self.L, seed=3))
        rules = parse_quantization([{**INT8[0], "act_qtype": act_qtype}])
        layer = self.filled(weight, PackingConfig(rules))
        assert layer.value_weight.get_value().storage == "int8"
        stands_for = np.asarray(dequantize(quantize(weight, WeightScheme("int8", None)), jnp.float32))
        expected = np.einsum("thl,hvl->thv", x, stands_for.reshape(self.H, self.V, self.L))
        found = layer.values_of(x)
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
        assert (np.abs(found - expected).max() > 1e-3) == (act_qtype is not None)
        np.testing.assert_array_equal(jnp.concatenate([layer.values_of(row[None]) for row in x]), found)

    def test_a_bfloat16_model_upcasts_to_bfloat16(self):
        layer = self.filled(self.weight(), parse_quantization(INT8), jnp.bfloat16)
        assert layer.weight.get_value().dtype == jnp.bfloat16


def test_whole_sequences_are_differentiable():
    attention, _ = make_attention()
    graph, state = nnx.split(attention)

    def loss(state):
        return jnp.square(whole(nnx.merge(graph, state), jnp.asarray(random(6, SIZES.hidden_size)))).sum()

    gradients = jax.tree.leaves(jax.jit(jax.grad(loss))(state))
    assert len(gradients) == len(list(attention.named_parameters()))
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in gradients)


def test_a_token_takes_a_latent_and_a_rope_key_in_the_cache():
    spec = LatentCacheSpec(512, 64)
    for num_devices in (1, 4):
        assert spec.on_devices(num_devices).layout(16, jnp.bfloat16).block_bytes == 2 * 16 * 576
