"""Grouped products, compiled for a GPU that is not there: no register is spilled, and no weight is copied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxis.compilation.compiled_program import read_program
from jaxis.compilation.targets import parse_target
from jaxis.kernels.weights.grouped_experts import grouped_matmul
from tests.kernels.ptxas import compiled_kernels
from tests.support.weight_stacks import KINDS, abstract_stack, stack_bytes

pytestmark = pytest.mark.compile_gpu

OFTEN = ("bfloat16", "int4 in groups of 128")
NUM_GROUPS, OUTPUTS, FEATURES = 32, 768, 2048
kinds = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.slow)
        for kind in KINDS
        if kind != "float32" and "minima" not in kind
    ],
)
# Decode and prefill: tiles of 16 and of 128 rows.
rows = pytest.mark.parametrize("num_rows", [64, pytest.param(4096, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def mesh(gpu_target):
    return Mesh(np.array(parse_target(gpu_target).devices()[:1]), ("model",))


def lowered_product(mesh, kind, num_rows):
    sharding = NamedSharding(mesh, PartitionSpec())
    stack = abstract_stack(kind, NUM_GROUPS, OUTPUTS, FEATURES, lambda _: sharding)
    x = jax.ShapeDtypeStruct((num_rows, FEATURES), jnp.bfloat16, sharding=sharding)
    group_sizes = jax.ShapeDtypeStruct((NUM_GROUPS,), jnp.int32, sharding=sharding)
    with jax.set_mesh(mesh):
        return jax.jit(grouped_matmul).lower(x, stack, group_sizes), stack


@kinds
@rows
def test_weights_are_read_where_they_are_without_spills(kind, num_rows, mesh, tmp_path):
    lowered, stack = lowered_product(mesh, kind, num_rows)
    ours = [each for each in compiled_kernels(lowered, tmp_path) if each.name.startswith("grouped_matmul")]
    print(*ours, sep="\n")
    assert len(ours) == 1
    assert ours[0].spilled_bytes == 0
    program = read_program(lowered.compile())
    activations = num_rows * FEATURES * 2
    assert program.memory.temporaries < stack_bytes(stack) / 20 + 2 * activations
    assert program.text.num_loops == 0
