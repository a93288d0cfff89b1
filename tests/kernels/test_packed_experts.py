"""The native kernel of a layer of experts, on every instruction set, against a loop in numpy in float64."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxis.kernels import native
from jaxis.kernels.weights import WeightScheme, as_weight, quantize
from jaxis.kernels.weights import packed_weight as packed
from jaxis.kernels.weights.packed_weight import PackedExperts
from jaxis.kernels.weights.stack_packer import StackPacker
from tests.support.isa import each_isa, isa  # noqa: F401 (isa is a fixture)
from tests.support.quantized_products import LOW_PRECISION_FLOATS, expected_weight, quantized_product, random_blocks

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason="the native library is not built"),
    each_isa,
    pytest.mark.usefixtures("isa"),
]

INTEGERS = [("int8", None, "absmax"), ("int8", 32, "absmax"), ("int4", 64, "minmax")]
SCHEMES = ["float32", "bfloat16", *LOW_PRECISION_FLOATS, *INTEGERS]
schemes = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s if isinstance(s, str) else "-".join(map(str, s)))
LIMIT, ALPHA = 0.7, 1.702


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu_tanh(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


UNITS = {
    "silu": lambda gate, up: gate * sigmoid(gate) * up,
    "gelu_tanh": lambda gate, up: gelu_tanh(gate) * up,
    "clamped_swiglu": lambda gate, up: (
        np.minimum(gate, LIMIT) * sigmoid(ALPHA * np.minimum(gate, LIMIT)) * (np.clip(up, -LIMIT, LIMIT) + 1)
    ),
    "capped_swiglu": lambda gate, up: np.minimum(gate * sigmoid(gate), LIMIT) * np.clip(up, -LIMIT, LIMIT),
    "limited_swiglu": lambda gate, up: (
        np.minimum(gate, LIMIT) * sigmoid(np.minimum(gate, LIMIT)) * np.clip(up, -LIMIT, LIMIT)
    ),
    "situ": lambda gate, up: ALPHA * np.tanh(gate / ALPHA) * sigmoid(gate) * LIMIT * np.tanh(up / LIMIT),
    "relu2": lambda gate, up: np.maximum(up, 0) ** 2,
}


@dataclasses.dataclass
class Stack:
    """A packed stack, and its experts' products one by one."""

    packed: packed.PackedWeight
    weights: list

    def product(self, x, expert, act_qtype):
        weight = self.weights[expert]
        if isinstance(weight, np.ndarray):
            return x @ weight.astype(np.float64).T
        if act_qtype is None:
            return x @ expected_weight(weight).T
        return quantized_product(x.astype(np.float32), weight)


def make_stack(scheme, num_experts, n, k, seed):
    stack, weights = StackPacker(num_experts), []
    for expert in range(num_experts):
        numbers = random(n, k, seed=seed + expert) * 0.3
        if scheme in LOW_PRECISION_FLOATS:
            blocks, weight = random_blocks(scheme, n, k, seed + expert)
            # Of the size of the others' numbers, so that no hidden state is out of the activations' range.
            blocks = dataclasses.replace(
                blocks, scale=(blocks.scale.astype(np.float32) / 16).astype(blocks.scale.dtype)
            )
            weights.append(weight / 16)
            stack.pack(expert, lambda allocate, w=blocks: w.pack(allocate=allocate))
            continue
        if isinstance(scheme, str):
            weight = numbers.astype(ml_dtypes.bfloat16 if scheme == "bfloat16" else np.float32)
        else:
            weight = quantize(numbers, WeightScheme(*scheme))
        weights.append(weight)
        stack.pack(expert, lambda allocate, w=weight: as_weight(w).pack(allocate=allocate))
    return Stack(stack.stack(), weights)


@dataclasses.dataclass
class Layer:
    gate: Stack
    up: Stack
    down: Stack
    biases: list  # of gate, up and down, or empty

    @classmethod
    def make(cls, scheme, num_experts=6, size=64, hidden=128, *, has_biases=False):
        biases = [random(num_experts, n, seed=n + 7) for n in (hidden, hidden, size)] if has_biases else []
        return cls(
            make_stack(scheme, num_experts, hidden, size, 100),
            make_stack(scheme, num_experts, hidden, size, 200),
            make_stack(scheme, num_experts, size, hidden, 300),
            biases,
        )

    def run(self, x, ids, weights, **options):
        @jax.jit
        def run(x, ids, weights, stacks, biases):
            return PackedExperts(*stacks, biases, alpha=ALPHA, limit=LIMIT, **options)(x, ids, weights)

        stacks = [self.gate.packed, self.up.packed, self.down.packed]
        return np.asarray(run(x, ids, weights, stacks, [jnp.asarray(bias) for bias in self.biases]))

    def by_hand(self, x, ids, weights, activation, act_qtype=None):
        """Float64, slot by slot."""
        out = np.zeros(x.shape)
        for token, slot in np.ndindex(*ids.shape):
            expert = ids[token, slot]
            if not 0 <= expert < len(self.gate.weights):
                continue
            bias_of = [bias[expert] for bias in self.biases] or [0, 0, 0]
            row = x[token : token + 1].astype(np.float64)
            gate = self.gate.product(row, expert, act_qtype) + bias_of[0]
            up = self.up.product(row, expert, act_qtype) + bias_of[1]
            hidden = UNITS[activation](gate, up)
            out[token] += weights[token, slot] * (self.down.product(hidden, expert, act_qtype) + bias_of[2])[0]
        return out


def route(num_tokens, slots, num_experts, seed=0):
    """Different experts for each of a token's slots."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(num_experts)[:slots] for _ in range(num_tokens)]).astype(np.int32)
    return ids, rng.random((num_tokens, slots), np.float32)


def assert_near(actual, exact, tolerance=2e-5):
    np.testing.assert_allclose(actual, exact, rtol=0, atol=tolerance * np.abs(exact).max())


@schemes
def test_experts_equal_a_loop_over_slots(scheme):
    layer, x = Layer.make(scheme), random(19, 64)
    ids, weights = route(19, 3, 5)  # no token asks for the last expert
    y = layer.run(x, ids, weights, activation="silu")
    assert_near(y, layer.by_hand(x, ids, weights, "silu"))


@pytest.mark.parametrize("scheme", INTEGERS, ids=lambda s: "-".join(map(str, s)))
def test_quantized_activations(scheme):
    layer, x = Layer.make(scheme), random(7, 64)
    ids, weights = route(7, 2, 6)
    y = layer.run(x, ids, weights, activation="silu", act_qtype="int8")
    # A hidden state just between two integers may be rounded to either: one step in 127 of one number's group.
    assert_near(y, layer.by_hand(x, ids, weights, "silu", "int8"), tolerance=5e-3)


@pytest.mark.parametrize("activation", UNITS)
@pytest.mark.parametrize("has_biases", [False, True])
def test_activations_and_biases_in_odd_sizes(activation, has_biases):
    layer, x = Layer.make("bfloat16", size=37, hidden=45, has_biases=has_biases), random(11, 37)
    ids, weights = route(11, 2, 6)
    y = layer.run(x, ids, weights, activation=activation)
    assert_near(y, layer.by_hand(x, ids, weights, activation))


@pytest.mark.sampled(4)
@schemes
def test_a_token_is_the_same_in_any_batch(scheme):
    layer, x = Layer.make(scheme, has_biases=True), random(100, 64)
    ids, weights = route(100, 3, 6)
    parts = [slice(0, 1), slice(50, 51), slice(99, 100), slice(3, 5), slice(20, 27), slice(40, 80)]
    for act_qtype in [None] if isinstance(scheme, str) else [None, "int8"]:
        options = {"activation": "clamped_swiglu", "act_qtype": act_qtype}
        together = layer.run(x, ids, weights, **options)
        for part in parts:
            np.testing.assert_array_equal(layer.run(x[part], ids[part], weights[part], **options), together[part])
        order = np.random.default_rng(1).permutation(100)
        np.testing.assert_array_equal(layer.run(x[order], ids[order], weights[order], **options), together[order])
        # Which slot an expert comes in does not matter either.
        np.testing.assert_array_equal(layer.run(x, ids[:, ::-1], weights[:, ::-1], **options), together)


@pytest.mark.parametrize(
    ("activation", "projection"),
    [*itertools.product(("capped_swiglu", "clamped_swiglu", "limited_swiglu", "situ"), (0, 1)), ("relu2", 1)],
)
def test_limits_let_nan_through(activation, projection):
    layer, x = Layer.make("float32", has_biases=True), random(3, 64)
    layer.biases[projection][2, 5] = np.nan
    ids, weights = np.array([[0], [2], [1]], np.int32), random(3, 1, seed=1)
    y = layer.run(x, ids, weights, activation=activation)
    np.testing.assert_array_equal(np.isnan(y), np.broadcast_to(ids == 2, y.shape))


def test_experts_that_are_not_there_add_nothing():
    layer, x = Layer.make("float32"), random(4, 64)
    ids, weights = np.array([[0, -1], [6, 7], [5, 1], [-7, 2]], np.int32), random(4, 2, seed=1)
    y = layer.run(x, ids, weights, activation="silu")
    assert_near(y, layer.by_hand(x, ids, weights, "silu"))
    assert not y[1].any()


def test_weights_of_experts_not_hit_are_not_read():
    layer, x = Layer.make("float32"), random(9, 64)
    ids, weights = route(9, 2, 4)
    for stack in (layer.gate, layer.up, layer.down):
        data = np.array(stack.packed.data)
        data[4:] = 0xFF  # NaNs
        stack.packed = dataclasses.replace(stack.packed, data=jnp.asarray(data))
    assert_near(layer.run(x, ids, weights, activation="silu"), layer.by_hand(x, ids, weights, "silu"))
