"""Products, layers of experts and tables of embeddings divided between devices give what one device does."""

import pytest

from tests.support.simulated_devices import run_on_devices

PREAMBLE = """
import dataclasses, types
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxis.kernels.low_rank import LowRankStack
from jaxis.kernels.weights import ExpertAdditions, ExpertStacks, dequantize, lookup, products
from jaxis.kernels.weights.grouped_experts import experts_by_groups
from jaxis.kernels.weights.products import matmul_on_shards
from jaxis.kernels.weights.experts_on_devices import experts_on_shards
from jaxis.kernels.weights.shards import in_equal_parts, lookup_on_shards, placement, shard_specs
from jaxis.kernels.weights.reordered_weight import ReorderedWeight
from jaxis.layers.glu import GLU
from jaxis.parallel.mesh import MESH_AXES, logical_sharding
from tests.support.weight_stacks import weight_stack

X, E, F, T, K = 4, 128, 512, 9, 2
rng = np.random.default_rng(0)
mesh = Mesh(np.array(jax.devices()).reshape(1, 4), MESH_AXES, axis_types=(AxisType.Auto,) * 2)
x = jnp.asarray(rng.standard_normal((T, E)), jnp.float32)
ids = jnp.asarray(rng.integers(0, X, (T, K)), jnp.int32)
shares = jnp.asarray(rng.uniform(0, 1, (T, K)), jnp.float32)

def additions(F):
    # Two slots of rank 3 at most; some tokens have none.
    def pairs(n, m):
        a, b = (jnp.asarray(rng.standard_normal((2 * X, 3, size)), jnp.float32) for size in (n, m))
        return LowRankStack(a, b, jnp.asarray(rng.integers(1, 4, 2 * X), jnp.int32))
    slots = jnp.asarray(rng.integers(0, 2 * X + 1, (T, K)), jnp.int32)
    return ExpertAdditions(slots, pairs(E, F), pairs(E, F), pairs(F, E))

"""

EXPERTS = """
def bias(n):
    return jnp.asarray(rng.standard_normal((X, n)), jnp.float32)

for kind in {by_features}:
    weights = [weight_stack(kind, X, *shape)[0] for shape in ((F, E), (F, E), (E, F))]
    biases = [bias(F), bias(F), bias(E)] if kind != "int8" else [None] * 3
    base = ExpertStacks(*weights, *biases, X, GLU(jax.nn.silu), scales_input=kind == "float32")
    for stacks in (base, dataclasses.replace(base, additions=additions(F))):
        alone = jax.jit(lambda: experts_by_groups(x, ids, shares, stacks))()
        with jax.set_mesh(mesh):
            divided = jax.jit(lambda: experts_on_shards(experts_by_groups, x, ids, shares, stacks))()
        np.testing.assert_allclose(divided, alone, rtol=0, atol=1e-4 * np.abs(alone).max(), err_msg=kind)

# Four devices have no whole groups of 160 features: each has a part of the last product's outputs instead.
for kind in {by_outputs}:
    weights = [weight_stack(kind, X, *shape)[0] for shape in ((160, E), (160, E), (E, 160))]
    base = ExpertStacks(*weights, bias(160), bias(160), bias(E), X, GLU(jax.nn.silu), False)
    for stacks in (base, dataclasses.replace(base, additions=additions(160))):
        alone = jax.jit(lambda: experts_by_groups(x, ids, shares, stacks))()
        with jax.set_mesh(mesh):
            assert placement(weights[2], ("expert", "embed", "mlp")) == ("expert", "mlp", "embed")
            divided = jax.jit(lambda: experts_on_shards(experts_by_groups, x, ids, shares, stacks))()
        np.testing.assert_allclose(divided, alone, rtol=0, atol=1e-4 * np.abs(alone).max(), err_msg=kind)

# 126 outputs cannot be divided either.
weights = [weight_stack("int8 in groups of 32", X, *shape)[0] for shape in ((160, E), (160, E), (126, 160))]
stacks = ExpertStacks(*weights, None, None, None, X, GLU(jax.nn.silu), False)
with jax.set_mesh(mesh):
    assert placement(weights[2], ("expert", "embed", "mlp")) == ("expert", "embed", "mlp")
    assert experts_on_shards(experts_by_groups, x, ids, shares, stacks) is None
assert experts_on_shards(experts_by_groups, x, ids, shares, stacks) is None
"""


def experts(by_features: list[str], by_outputs: list[str]) -> str:
    """The script for weights of these kinds, of which devices have parts of the features, or of the outputs."""
    return EXPERTS.replace("{by_features}", repr(by_features)).replace("{by_outputs}", repr(by_outputs))


PRODUCTS = """
# Tests have no accelerator, so that XLA's product takes the kernel's place on each device.
kernels = types.SimpleNamespace(xla_dequantizes_in_memory=lambda stack: stack.kind != "float")
products.kernels_of_platform = lambda: kernels

for kind in ("int8", "int4 in groups of 128", "int4 with minima in groups of 256", "fp8 in blocks", "MXFP4"):
    # With groups of 256, devices have parts of the outputs even of a weight whose features are divided.
    for axes in (("mlp", "embed"), ("embed", "mlp"), (None, "embed")):
        weight = jax.tree.map(lambda array: array[0], weight_stack(kind, 1, F, F)[0])
        rows = jnp.asarray(rng.standard_normal((3, F)), jnp.float32)
        with jax.set_mesh(mesh):
            divided = jax.jit(lambda: matmul_on_shards(rows, weight, jnp.float32, axes))()
        alone = np.asarray(rows) @ np.asarray(dequantize(weight)).T
        np.testing.assert_allclose(divided, alone, rtol=0, atol=1e-4 * np.abs(alone).max(), err_msg=f"{kind} {axes}")

with jax.set_mesh(mesh):
    assert matmul_on_shards(rows, jnp.zeros((F, F)), None, ("mlp", "embed")) is None
assert matmul_on_shards(rows, weight, None, ("mlp", "embed")) is None
"""

BLOCKS = """
weight = jax.tree.map(lambda array: array[0], weight_stack("fp8 in blocks", 1, 320, 384)[0])
with jax.set_mesh(mesh):
    for axes, axis, block_shape in ((("mlp", "embed"), -2, (16, 128)), (("embed", "mlp"), -1, (128, 32))):
        assert shard_specs(weight, axis, 4) is None
        smaller = in_equal_parts(weight, axes)
        assert smaller.block_shape == block_shape
        assert shard_specs(smaller, axis, 4) is not None
        np.testing.assert_array_equal(dequantize(smaller), dequantize(weight))
assert in_equal_parts(weight, axes) is weight
"""

LOOKUPS = """
# The first and last rows of each device's 128, and ids out of range, which are clipped.
wanted = jnp.asarray([-1, 0, 127, 128, 300, 511, 512, 2**31 - 1, -(2**31)], jnp.int32)
for kind in ("float32", "int8", "int8 in groups of 32", "int4 in groups of 128", "fp8 in blocks", "MXFP4"):
    for dtype in (jnp.float32, jnp.bfloat16):
        weight = jax.tree.map(lambda array: array[0], weight_stack(kind, 1, F, E)[0])
        if kind == "float32":
            weight = jnp.asarray(weight).at[300, :3].set(jnp.asarray([jnp.nan, jnp.inf, -jnp.inf]))
        alone = jax.jit(lambda: lookup(wanted, weight, dtype))()
        with jax.set_mesh(mesh):
            divided = jax.jit(lambda: lookup_on_shards(wanted, weight, dtype, "vocab"))()
        np.testing.assert_array_equal(*(np.asarray(each, np.float32) for each in (divided, alone)), err_msg=kind)

# Each device reads its own part, and only the rows are exchanged.
table = jax.ShapeDtypeStruct((F, E), jnp.float32, sharding=logical_sharding(mesh, ("vocab", "embed"), (F, E)))
with jax.set_mesh(mesh):
    look_up = jax.jit(lambda ids, table: lookup(ids, table, jnp.float32, axes=("vocab", "embed")))
    text = look_up.lower(wanted, table).compile().as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text

    assert lookup_on_shards(wanted, weight, dtype, None) is None
    assert lookup_on_shards(wanted, jnp.zeros((511, E)), dtype, "vocab") is None
assert lookup_on_shards(wanted, weight, dtype, "vocab") is None
"""

PADDED = """
# 509 rows on four devices: three of zeros follow. Blocks of 128 rows become smaller.
wanted = jnp.asarray([0, 1, 127, 128, 255, 256, 383, 384, 507, 508], jnp.int32)
axes = ("vocab", "embed")
kinds = ("float32", "int8", "int4 in groups of 128", "int4 with minima in groups of 256", "fp8 in blocks", "MXFP4")
for kind in (*kinds, "int8 in groups of 32"):
    weight = jax.tree.map(lambda array: array[0], weight_stack(kind, 1, 509, 256)[0])
    if kind == "int8 in groups of 32":
        order = jnp.asarray(rng.permutation(256), jnp.int32)[None]
        weight = ReorderedWeight(weight, order)  # of GPTQ
    own = np.asarray(dequantize(weight))
    assert in_equal_parts(weight, axes) is weight
    with jax.set_mesh(mesh):
        padded = in_equal_parts(weight, axes)
        rows = jax.jit(lambda: lookup(wanted, padded, jnp.float32, axes=axes))()
        of_shards = jax.jit(lambda: lookup_on_shards(wanted, padded, jnp.float32, "vocab"))()
    np.testing.assert_array_equal(dequantize(padded), np.concatenate([own, np.zeros((3, 256))]), err_msg=kind)
    np.testing.assert_array_equal(rows, own[wanted], err_msg=kind)
    assert (of_shards is None) == (kind == "int8 in groups of 32"), kind
"""


@pytest.mark.slow
@pytest.mark.multi_device
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            # In one process. The products come last: what they replace stays so.
            experts(["float32", "int4 in groups of 128"], ["MXFP4"]) + BLOCKS + LOOKUPS + PADDED + PRODUCTS,
            id="experts, blocks, lookups, padding and products",
        ),
        pytest.param(
            experts(["int8", "fp8 in blocks"], ["int8 in groups of 32", "int4 with minima"]),
            id="experts of other types",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_four_devices_give_what_one_does(script):
    run_on_devices("-c", PREAMBLE + script)
