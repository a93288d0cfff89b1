"""Grouped products and layers of experts, compiled for TPUs that are not there: no weight is copied or gathered."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxis.compilation.compiled_program import CompiledProgram, read_program
from jaxis.compilation.targets import parse_target
from jaxis.engine.execution.weight_layout import laid_out
from jaxis.kernels.weights import ExpertStacks, experts, matmul
from jaxis.kernels.weights.grouped_experts import grouped_matmul
from jaxis.layers.glu import GLU
from jaxis.parallel.mesh import MESH_AXES, logical_sharding
from tests.support.weight_stacks import KINDS, abstract_stack, stack_bytes

pytestmark = pytest.mark.compile_tpu

LOW_PRECISION = [kind for kind in KINDS if kind != "float32"]
OFTEN = ("bfloat16", "int4 in groups of 128", "int4 with minima", "fp8 in blocks")
# Name -> rows, X, out, in.
SHAPES = {
    "Qwen3 30B A3B": (512, 128, 768, 2048),
    "Qwen3 30B A3B, one token": (8, 128, 2048, 768),
    "Mixtral": (1024, 8, 4096, 14336),
    "DeepSeek V3": (512, 32, 2048, 7168),
    "GPT-OSS": (256, 32, 2880, 2880),
}
GATE_AXES, DOWN_AXES = ("expert", "mlp", "embed"), ("expert", "embed", "mlp")


def mesh_of(target: str, num_devices: int) -> Mesh:
    """The first devices of a TPU, as its compiler describes them."""
    devices = parse_target(target).devices()
    return Mesh(np.asarray(devices[:num_devices]).reshape(1, -1), MESH_AXES)


def array(mesh: Mesh, dtype: Any, *shape: int, axes: tuple[str | None, ...] | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=logical_sharding(mesh, axes, shape))


def compiled_product(target: str, kind: str, shape: str) -> tuple[CompiledProgram, int]:
    num_rows, *sizes = SHAPES[shape]
    mesh = mesh_of(target, 1)
    stack = laid_out(abstract_stack(kind, *sizes, lambda _: NamedSharding(mesh, PartitionSpec())))
    x, group_sizes = array(mesh, jnp.bfloat16, num_rows, sizes[2]), array(mesh, jnp.int32, sizes[0])
    with jax.set_mesh(mesh):
        compiled = jax.jit(grouped_matmul).lower(x, stack, group_sizes).compile()
    return read_program(compiled), stack_bytes(stack)


def check(program: CompiledProgram, num_products: int, weight_bytes: int) -> None:
    assert len(program.text.kernels) == num_products
    assert program.memory.temporaries < weight_bytes / 12
    # Not even the scales are copied.
    assert all(copy.nbytes < weight_bytes / 40 for copy in program.text.copies)


@pytest.mark.parametrize(
    "target", ["v5e-1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v6e-1", "tpu7x-8"))]
)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.slow) for kind in LOW_PRECISION]
)
def test_every_kind_of_weight_is_read_where_it_is(kind, target):
    program, weight_bytes = compiled_product(target, kind, "Qwen3 30B A3B")
    check(program, 1, weight_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e-1", "v6e-1", "tpu7x-8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_fits(shape, target):
    program, weight_bytes = compiled_product(target, "bfloat16", shape)
    check(program, 1, weight_bytes)


@pytest.mark.parametrize(
    "kind",
    ["int4 in groups of 32", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("fp8 in blocks", "MXFP4"))],
)
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_products_on_several_devices_move_no_weights(num_tokens, kind):
    """A column-parallel product and a row-parallel one."""
    mesh, hidden, intermediate = mesh_of("v5e-8", 8), 4096, 14336

    def weight(n: int, m: int, axes: tuple[str, str]) -> Any:
        stack = abstract_stack(kind, 1, n, m, lambda _: NamedSharding(mesh, PartitionSpec()))
        return laid_out(jax.tree.map(lambda leaf: array(mesh, leaf.dtype, *leaf.shape[1:], axes=axes), stack))

    def block(x: jax.Array, up: Any, down: Any) -> jax.Array:
        return matmul(jax.nn.silu(matmul(x, up, axes=GATE_AXES[1:])), down, axes=DOWN_AXES[1:])

    up, down = weight(intermediate, hidden, GATE_AXES[1:]), weight(hidden, intermediate, DOWN_AXES[1:])
    with jax.set_mesh(mesh):
        compiled = jax.jit(block).lower(array(mesh, jnp.bfloat16, num_tokens, hidden), up, down).compile()
    program = read_program(compiled)
    check(program, 2, stack_bytes(up) // 8)
    assert [each.opcode for each in program.text.collectives] == ["all-reduce"]


@pytest.mark.parametrize("kind", ["bfloat16", pytest.param("fp8 in blocks", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("target", "num_devices"), [("v5e-8", 8), pytest.param("v6e-4", 4, marks=pytest.mark.slow)])
def test_a_layer_on_several_devices_has_one_sum_and_moves_no_weights(target, num_devices, kind):
    num_tokens, k, num_experts, hidden, intermediate = 64, 2, 8, 4096, 14336
    mesh = mesh_of(target, num_devices)

    def stack(n: int, m: int, axes: tuple[str, ...]) -> Any:
        return laid_out(abstract_stack(kind, num_experts, n, m, functools.partial(logical_sharding, mesh, axes)))

    gate, down = stack(intermediate, hidden, GATE_AXES), stack(hidden, intermediate, DOWN_AXES)

    def layer(x: jax.Array, ids: jax.Array, weights: jax.Array, gate: Any, up: Any, down: Any) -> jax.Array:
        unit = GLU(jax.nn.silu)
        stacks = ExpertStacks(gate, up, down, None, None, None, num_experts, unit, scales_input=False)
        return experts(x, ids, weights, stacks)

    of_slots = (num_tokens, k)
    operands = (
        array(mesh, jnp.bfloat16, num_tokens, hidden),
        array(mesh, jnp.int32, *of_slots),
        array(mesh, jnp.float32, *of_slots),
    )
    with jax.set_mesh(mesh):
        program = read_program(jax.jit(layer).lower(*operands, gate, gate, down).compile())
    check(program, 3, stack_bytes(gate) // num_devices)
    assert [each.opcode for each in program.text.collectives] == ["all-reduce"]
    assert program.text.collectives[0].nbytes == 2 * num_tokens * hidden
