"""Weights of low-bit codes packed for the native kernels, on every instruction set, against numpy in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxis.kernels import native
from jaxis.kernels.weights import CodedWeight, PackedWeight, fused_matmul, lookup, pack
from jaxis.kernels.weights import packed_weight as packed
from jaxis.kernels.weights.packed_weight import PackedExperts
from jaxis.kernels.weights.stack_packer import StackPacker
from tests.kernels.coded_weights import KINDS, random_codes
from tests.support.dequantized import dequantize
from tests.support.isa import each_isa, isa  # noqa: F401 (isa is a fixture)
from tests.support.quantized_products import rounded_activations
from tests.support.quick_rows import quick_rows

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason="the native library is not built"),
    each_isa,
    pytest.mark.usefixtures("isa"),
]

kinds = pytest.mark.parametrize("kind", KINDS)
ROWS = 40
# Of a batch: one row, and as many as the micro-kernels take and do not.
PARTS = [slice(0, ROWS), *(slice(at, at + n) for at, n in [(0, 1), (3, 1), (5, 2), (11, 8), (2, 33)])]
# Bits of an element in memory: those of the file, but for K-quants' scales of 6 and 4 bits in bytes, for three bits in
# four, and for zero points that are floats.
BITS = {"q5_0": 5.5, "q4_1": 5, "q5_1": 6, "q4_k": 4.625, "q5_k": 5.625, "q6_k": 6.5625, "iq4_nl": 4.5}
BITS |= {"iq4_xs": 4.3125, "nvfp4": 4.5, "nf4": 4.5, "mlx4": 4.5, "mlx8": 8.5}
BITS |= {"q2_k": 3.125, "q3_k": 4.5625, "gptq3": 4.1875, "hqq": 4.75}


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sizes(kind):
    columns = max(KINDS[kind].get("super") or 0, KINDS[kind]["group"], 32)
    return [(33, columns), (70, 3 * columns), (1, 2 * columns)]


def has_int8_products(kind):
    return kind != "nf4"


def magnitude(weight):
    """The largest term of an element, before a minimum or a zero point is taken off."""
    return 2 * float(jnp.abs(dequantize(dataclasses.replace(weight, minimum=None, zero_point=None))).max())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", quick_rows(KINDS, ["gptq3", "nvfp4", "q6_k"]))
def test_products_equal_numpy_and_a_row_is_the_same_in_any_batch(kind):
    for n, k in sizes(kind):
        weight, dense = random_codes(kind, n, k)
        x = random(ROWS, k, seed=1)
        x[3, : k // 2] = 0
        for act_qtype in [None, "int8"] if has_int8_products(kind) else [None]:
            weight = dataclasses.replace(weight, act_qtype=act_qtype)
            # One program for all of them: compiling takes longer than running.
            multiply = jax.jit(lambda x, w, q=act_qtype: [packed.matmul(x[p], [w], act_qtype=q)[0] for p in PARTS])
            panels = weight.pack()
            assert panels is not None
            together, *parts = multiply(x, panels)
            used = x.astype(np.float64) if act_qtype is None else rounded_activations(x)
            tolerance = 1e-6 * np.abs(x).sum(axis=1).max() * max(np.abs(dense).max(), magnitude(weight))
            message = f"{n}, {k}, {act_qtype}"
            np.testing.assert_allclose(together, used @ dense.T, rtol=0, atol=tolerance, err_msg=message)
            for part, rows in zip(PARTS[1:], parts, strict=True):
                np.testing.assert_array_equal(rows, together[part], err_msg=f"{message}, {part}")


@pytest.mark.sampled(6)
@kinds
def test_rows_looked_up_are_those_of_the_definition(kind):
    n, k = sizes(kind)[1]
    weight, _ = random_codes(kind, n, k)
    panels = weight.pack()
    expected = np.asarray(dequantize(weight))
    if kind == "hqq":  # its zero points are floats, which minima stand for
        np.testing.assert_allclose(dequantize(panels), expected, rtol=0, atol=1e-6 * np.abs(expected).max())
        return
    np.testing.assert_array_equal(dequantize(panels), expected)
    ids = np.array([0, n - 1, n // 2, 0, -5, n + 1000], np.int32)
    np.testing.assert_array_equal(lookup(jnp.asarray(ids), panels, jnp.float32), expected[np.clip(ids, 0, n - 1)])


@kinds
def test_a_weight_takes_the_memory_of_its_format(kind):
    n, k = 64, 3 * sizes(kind)[0][1]
    panels = random_codes(kind, n, k)[0].pack()
    # NVFP4 has a float32 a row besides.
    assert panels.nbytes * 8 / (n * k) == BITS[kind] + (32 / k if kind == "nvfp4" else 0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["q5_0", "q4_k", "q6_k"])
def test_weights_of_one_format_are_multiplied_at_once(kind):
    n, k = sizes(kind)[1]
    weights = [random_codes(kind, rows, k, seed=rows)[0].pack() for rows in (n, 5, 64)]
    x = jnp.asarray(random(9, k))
    together = fused_matmul(x, weights)
    for product, weight in zip(together, weights, strict=True):
        np.testing.assert_array_equal(product, packed.matmul(x, [weight])[0])
    gate, up = (random_codes(kind, n, k, seed=seed)[0].pack() for seed in (1, 2))
    (gated,) = packed.matmul(x, [gate, up], activation="silu")
    expected = jax.nn.silu(packed.matmul(x, [gate])[0]) * packed.matmul(x, [up])[0]
    np.testing.assert_allclose(gated, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "kinds_of_matrices",
    [("q4_k", "q4_k", "q6_k"), ("q6_k", "q6_k", "q4_k"), ("q4_1", "q6_k", "nvfp4"), ("iq4_nl",) * 3],
    ids="-".join,
)
@pytest.mark.parametrize("act_qtype", [None, "int8"])
def test_experts(kinds_of_matrices, act_qtype):
    size, hidden, num = 256, 512, 3
    gate_kind, up_kind, down_kind = kinds_of_matrices

    def stack(kind, n, k, seed):
        weights = [random_codes(kind, n, k, seed + expert) for expert in range(num)]
        out = StackPacker(num)
        for expert, (weight, _) in enumerate(weights):
            one = dataclasses.replace(weight, act_qtype=act_qtype)
            out.pack(expert, lambda allocate, one=one: one.pack(allocate=allocate))
        return out.stack(), weights

    gate, gates = stack(gate_kind, hidden, size, 1)
    up, ups = stack(up_kind, hidden, size, 11)
    down, downs = stack(down_kind, size, hidden, 21)
    x = random(5, size) / 64
    ids = np.array([[0, 2], [1, 0], [2, 2], [0, 1], [-1, 1]], np.int32)
    weights = random(5, 2, seed=1)
    y = PackedExperts(gate, up, down, activation="silu", act_qtype=act_qtype)(jnp.asarray(x), ids, weights)

    def product(x, weight, dense):
        return (x if act_qtype is None else rounded_activations(x)) @ dense.T

    expected = np.zeros((5, size))
    for token in range(5):
        for slot, expert in enumerate(ids[token]):
            if expert < 0:
                continue
            gate_out = product(x[token : token + 1], *gates[expert])
            inner = gate_out / (1 + np.exp(-gate_out)) * product(x[token : token + 1], *ups[expert])
            expected[token] += weights[token, slot] * product(inner.astype(np.float32), *downs[expert])[0]
    # Rounding of the hidden states to int8 may fall on the other side.
    tolerance = 2e-5 if act_qtype is None else 2e-3
    np.testing.assert_allclose(y, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def coded(bits=4, group=32, k=64, **fields):
    codes = np.zeros((4, k * {8: 8, 3: 2, 2: 2}.get(bits, 4) // 8), np.uint8)
    return CodedWeight(codes, **{"scale": np.ones((4, k // group), np.float16), "bits": bits, **fields})


def super_scaled(blocks, dtype=np.float16, **fields):
    return coded(k=512, scale=np.ones((4, 16), np.uint8), super_scale=np.ones((4, blocks), dtype), **fields)


@pytest.mark.parametrize(
    "weight",
    [
        coded(group=8),
        coded(group=16, k=48),
        coded(group=48, k=96),
        coded(bits=5),  # whose upper bits are missing
        coded(offset=16),
        coded(minimum=np.ones((4, 2)), zero_point=np.ones((4, 2), np.uint8)),
        coded(minimum=np.ones((3, 2))),
        coded(scale=np.ones((3, 2), np.float16)),
        coded(levels=(0.0,) * 17),
        coded(levels=(0.0,) * 16, zero_point=np.ones((4, 2), np.uint8)),
        coded(levels=(0.0, 0.3), act_qtype="int8"),
        super_scaled(32),
        super_scaled(2, np.float64),
        super_scaled(2, minimum=np.ones((4, 16), np.uint8)),
        super_scaled(2, super_minimum=np.ones((4, 2), np.float16)),
        super_scaled(3),
    ],
)
def test_weights_without_a_kernel_stay_as_they_are(weight):
    assert weight.pack() is None
    assert pack(weight) is weight


def test_wide_groups_are_cut():
    weight = coded(group=256, k=512, minimum=np.full((4, 2), 2, ml_dtypes.bfloat16))
    panels = pack(weight)
    assert isinstance(panels, PackedWeight)
    np.testing.assert_array_equal(dequantize(panels), np.full((4, 512), 2))
