"""Layers of experts, quantized and packed: what is kept in memory, and that they compute what dense experts do."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxis.errors import CheckpointError, ConfigError
from jaxis.kernels import native
from jaxis.kernels.weights import PackedWeight, QuantizedWeight, WeightScheme, quantize
from jaxis.layers.experts import JaxExperts, StackLayout
from jaxis.layers.glu import GLU, CappedGLU, ClampedGLU
from jaxis.layers.mlp import activation_function
from jaxis.layers.module import UnusedRngs
from jaxis.quantization.arguments import parse_quantization
from jaxis.quantization.wrappers import PackingConfig
from tests.support.dequantized import dequantize

X, E, F, T, K = 5, 64, 96, 9, 2
SILU = GLU(activation_function("silu"))
needs_native = pytest.mark.skipif(not native.usable(), reason="needs the native kernels")
SCHEMES = [("int8", None, "absmax"), ("int8", 32, "absmax"), ("int4", 32, "mse"), ("int4", 32, "minmax")]
schemes = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: "-".join(map(str, scheme)))
packings = pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_native)], ids=["plain", "native"])


def rules(qtype, tile_size=None, calibration="absmax", act_qtype=None, path=".*"):
    rule = {
        **{"module_path": path, "weight_qtype": qtype, "tile_size": tile_size},
        **{"weight_calibration_method": calibration, "act_qtype": act_qtype},
    }
    return parse_quantization([rule])


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.cache
def tensors(dtype="float32"):
    """A checkpoint's, expert by expert, in the names of Qwen3 MoE."""
    shapes = {"gate_proj": (F, E), "up_proj": (F, E), "down_proj": (E, F)}
    return {
        f"{expert}.{name}.weight": (random(*shape, seed=10 * expert + i) / 8).astype(dtype)
        for i, (name, shape) in enumerate(shapes.items())
        for expert in range(X)
    }


def abstract(quant_config, **options):
    arguments = {"gated_unit": SILU, "dtype": jnp.float32, "prefix": "model.layers.0.mlp.experts"} | options
    return nnx.eval_shape(lambda: JaxExperts(X, E, F, UnusedRngs(0), quant_config=quant_config, **arguments))


def loaded(quant_config, weights, *, scales_input=False, **options):
    layer = abstract(quant_config, **options)
    layer.scales_input = scales_input
    layer.load_weights(weights.items())
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def stacks(layer):
    return [getattr(layer, f"{name}_proj").get_value() for name in ("gate", "up", "down")]


def is_packed(layer):
    return all(isinstance(stack, PackedWeight) for stack in stacks(layer))


def routed():
    rng = np.random.default_rng(3)
    ids = np.stack([rng.permutation(X)[:K] for _ in range(T)]).astype(np.int32)
    return random(T, E, seed=1), ids, rng.random((T, K), np.float32)


def apply(layer, x, ids, weights):
    return np.asarray(nnx.jit(lambda layer, *args: layer(*args))(layer, x, ids, weights))


def by_hand(weights, x, ids, expert_weights, unit=SILU):
    """Slot by slot; `weights` are the dense ones by their names."""
    out = np.zeros_like(x)
    for token, slot in np.ndindex(*ids.shape):
        gate, up, down = (weights[f"{ids[token, slot]}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        hidden = np.asarray(unit(gate @ x[token], up @ x[token]))
        out[token] += expert_weights[token, slot] * (down @ hidden)
    return out


def assert_near(actual, exact, tolerance=1e-5):
    np.testing.assert_allclose(actual, exact, rtol=0, atol=tolerance * np.abs(exact).max())


@pytest.mark.sampled
@schemes
@packings
def test_quantized_experts_are_those_of_the_dequantized_weights(scheme, packed):
    config = rules(*scheme)
    layer = loaded(PackingConfig(config) if packed else config, tensors())
    kind = PackedWeight if packed else QuantizedWeight
    assert all(isinstance(getattr(layer, f"{name}_proj").get_value(), kind) for name in ("gate", "up", "down"))
    dense = {
        name: np.asarray(dequantize(quantize(tensor, WeightScheme(*scheme)))) for name, tensor in tensors().items()
    }
    assert_near(apply(layer, *routed()), by_hand(dense, *routed()))


@packings
def test_quantized_activations_come_close(packed):
    config = rules("int8", None, act_qtype="int8")
    layer = loaded(PackingConfig(config) if packed else config, tensors())
    y, exact = apply(layer, *routed()), by_hand(tensors(), *routed())
    error = np.abs(y - exact).max() / np.abs(exact).max()
    assert 1e-4 < error < 0.03  # two roundings to 127 steps, and they did take place


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_experts_keep_the_numbers_of_the_file(dtype):
    weights = tensors(dtype)
    layer = loaded(PackingConfig(), weights)
    for name in ("gate_proj", "up_proj", "down_proj"):
        stack = getattr(layer, name).get_value()
        assert (stack.storage, len(stack.data)) == (dtype, X)
        assert isinstance(stack.data, jax.Array)
        # Nothing but the numbers: no second copy, no padding.
        assert stack.nbytes == X * E * F * np.dtype(dtype).itemsize
    dense = {name: tensor.astype(np.float32) for name, tensor in weights.items()}
    assert_near(apply(layer, *routed()), by_hand(dense, *routed()))


@needs_native
def test_a_bfloat16_model_rounds_a_float32_file():
    layer = loaded(PackingConfig(), tensors(), dtype=jnp.bfloat16)
    assert layer.up_proj.get_value().storage == "bfloat16"
    dense = {name: tensor.astype(ml_dtypes.bfloat16).astype(np.float32) for name, tensor in tensors().items()}
    assert_near(apply(layer, *routed()), by_hand(dense, *routed()))


@needs_native
def test_layers_alike_are_traced_once_however_their_weights_came():
    configs = [None, rules("int8"), rules("int8", 32)]
    layers = [loaded(PackingConfig(config), tensors()) for config in configs]
    graphs = [nnx.graphdef(layer) for layer in layers]
    assert len(set(graphs)) == 1


@needs_native
@pytest.mark.parametrize(
    "unit",
    [GLU(activation_function("gelu_pytorch_tanh")), ClampedGLU(limit=0.5), CappedGLU(activation_function("silu"), 0.1)],
    ids=["gelu", "clamped", "capped"],
)
def test_other_gated_units(unit):
    layer = loaded(PackingConfig(), tensors(), gated_unit=unit)
    assert is_packed(layer)
    assert_near(apply(layer, *routed()), by_hand(tensors(), *routed(), unit=unit))


@pytest.mark.sampled(4)
@packings
@pytest.mark.parametrize(
    "unit", [GLU(activation_function("relu")), CappedGLU(activation_function("relu"), 0.1)], ids=["relu", "capped"]
)
def test_a_unit_without_a_kernel_stays_with_plain_jax(unit, packed):
    layer = loaded(PackingConfig() if packed else None, tensors(), gated_unit=unit)
    assert all(isinstance(stack, jax.Array) for stack in stacks(layer))
    assert_near(apply(layer, *routed()), by_hand(tensors(), *routed(), unit=unit))


@packings
def test_weights_on_the_input(packed):
    layer = loaded(PackingConfig() if packed else None, tensors(), scales_input=True)
    x, ids, weights = routed()
    exact = np.zeros_like(x)
    for slot in range(K):
        exact += by_hand(tensors(), x * weights[:, slot, None], ids[:, slot, None], np.ones((T, 1), np.float32))
    assert_near(apply(layer, x, ids, weights), exact)


@needs_native
def test_fused_transposed_interleaved_tensors_with_biases():
    weights = tensors("bfloat16")
    stacks = {name: np.stack([weights[f"{e}.{name}.weight"] for e in range(X)]) for name in ("gate_proj", "up_proj")}
    down = np.stack([weights[f"{e}.down_proj.weight"] for e in range(X)])
    fused = np.stack([stacks["gate_proj"], stacks["up_proj"]], axis=2).reshape(X, 2 * F, E)
    checkpoint = {
        "gate_up_proj": np.swapaxes(fused, 1, 2),
        "gate_up_proj_bias": random(X, 2 * F, seed=1),
        "down_proj": np.swapaxes(down, 1, 2),
        "down_proj_bias": random(X, E, seed=2),
    }
    layout = StackLayout(transposed=True, interleaved=True)
    options = {"use_bias": True, "stack_layout": layout, "gated_unit": ClampedGLU(limit=0.5)}
    packed, plain = (loaded(config, checkpoint, **options) for config in (PackingConfig(), None))
    assert is_packed(packed)
    assert_near(apply(packed, *routed()), apply(plain, *routed()))


@packings
def test_broken_checkpoints_are_one_clear_error(packed):
    config = rules("int8")
    config = PackingConfig(config) if packed else config
    layer, weight = abstract(config), random(F, E)
    layer.load_weights([("0.gate_proj.weight", weight)])
    with pytest.raises(CheckpointError, match=r"tensor '0.gate_proj.weight' \[96, 64\] is a duplicate for expert 0"):
        layer.load_weights([("0.gate_proj.weight", weight)])
    with pytest.raises(CheckpointError, match=r"has \[96, 8\] for an expert in the checkpoint, \[96, 64\] in the"):
        layer.load_weights([("1.gate_proj.weight", weight[:, :8])])
    weight[3, 3] = np.nan
    with pytest.raises(CheckpointError, match=r"tensor '1.gate_proj.weight' \[96, 64\] has values that are not finite"):
        layer.load_weights([("1.gate_proj.weight", weight)])
    assert layer.gate_proj.get_value().missing == [1, 2, 3, 4]


@packings
def test_the_expert_that_cannot_be_quantized_is_named(packed):
    """Whichever thread packs it, and whatever comes after it."""
    config = rules("int8")
    layer, weights = abstract(PackingConfig(config) if packed else config), dict(tensors())
    name = "2.down_proj.weight"
    weights[name] = np.full_like(weights[name], np.inf)
    with pytest.raises(CheckpointError, match=rf"tensor '{name}' .* has values that are not finite"):
        layer.load_weights(weights.items())


@pytest.mark.sampled
@needs_native
@schemes
def test_packed_stacks_are_the_same_in_any_order(scheme):
    config, generator = PackingConfig(rules(*scheme)), np.random.default_rng(0)
    names = list(tensors())
    expected = loaded(config, tensors())
    for _ in range(5):
        found = loaded(config, {name: tensors()[name] for name in generator.permutation(names)})
        for value, other in zip(stacks(expected), stacks(found), strict=True):
            assert value.format == other.format
            assert np.array_equal(value.data, other.data)


@needs_native
def test_types_that_differ_between_experts():
    quantized, wide = random(F, E).astype(ml_dtypes.bfloat16), random(F, E)
    layer = abstract(PackingConfig())
    layer.load_weights([("0.up_proj.weight", wide), ("1.up_proj.weight", quantized)])  # which float32 holds
    assert layer.up_proj.get_value().missing == [2, 3, 4]
    layer = abstract(PackingConfig())
    layer.load_weights([("0.up_proj.weight", quantized)])
    with pytest.raises(CheckpointError, match=r"tensor '1.up_proj.weight' .* has a different type from those of the"):
        layer.load_weights([("1.up_proj.weight", wide)])


def test_rules_know_experts_by_their_layers_name():
    named = abstract(rules("int8", path=r"model\.layers\.\d+\.mlp\.experts"))
    assert named.quant_method.scheme == WeightScheme("int8")
    assert abstract(rules("int8", path=r".*\.down_proj")).quant_method.scheme is None
    with pytest.raises(ConfigError, match=r"model.layers.0.mlp.experts has 64 input features, which tile_size=48"):
        abstract(rules("int8", 48))
