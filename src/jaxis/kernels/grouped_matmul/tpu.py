"""The grouped product on TPU: a Pallas kernel that reads stored weights once, and only of groups with rows.

The grid goes through blocks of outputs and, within each, through visits of row tiles (`visits.py`), as in MegaBlocks
(arXiv:2211.15841) and JAX's megablox. A block of weights holds whole rows, so that visits of one group find it in VMEM.
Each result is summed over the features in the same chunks, regardless of the number of rows.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jaxis.kernels.grouped_matmul.elements import scale_to_float32, to_floats
from jaxis.kernels.grouped_matmul.stored import PAIRED, StoredStack, by_parts
from jaxis.kernels.grouped_matmul.visits import visits
from jaxis.kernels.hbm import in_hbm

_LANES = 128
_CHUNK = 512  # stored columns of a partial sum
_BLOCK_BYTES = 4 << 20  # of weights, and of rows: both are buffered twice
_MOST_OUTPUTS, _MOST_ROWS, _ROW_MULTIPLE = 512, 512, 16
_SUBLANES = 8
_LONGEST_BLOCK_BYTES = 12 << 20  # of weights whose rows are too long for _BLOCK_BYTES
_VMEM_BYTES = 48 << 20  # a TPU7x has 64 MiB, others 128


@dataclass(frozen=True)
class _Plan:
    """Sizes of a product's tiles.

    Attributes:
      outputs: Outputs of a block.
      rows: Rows of a tile.
      chunk: Stored columns of a partial sum; the rest of a row is a shorter chunk.
      chunks_a_scale: Chunks that share a scale; None if elements of one chunk have different scales.
      offset: Array in addition to scales: "zero_point", "minimum" or None.
      scale_rows: Outputs that share a scale.
    """

    kind: str
    outputs: int
    rows: int
    chunk: int
    chunks_a_scale: int | None
    offset: str | None
    stored_columns_a_scale: int
    scale_rows: int


def supports(x: jax.Array | jax.ShapeDtypeStruct, stack: StoredStack) -> bool:
    """Returns whether the kernel takes rows x [N, in] and these weights."""
    return x.dtype in (jnp.bfloat16, jnp.float32) and x.shape[0] > 0 and _plan(x, stack) is not None


def xla_dequantizes_in_memory(stack: StoredStack) -> bool:
    """Returns whether XLA would dequantize this weight in memory before a product; see docs/accelerators.md."""
    return stack.kind in PAIRED or (stack.scale is not None and stack.scale.shape[2] > 1)


def grouped_matmul(
    x: jax.Array,
    stack: StoredStack,
    group_sizes: jax.Array,
    *,
    out_dtype: DTypeLike | None = None,
    interpret: pltpu.InterpretParams | bool = False,
) -> jax.Array:
    """Computes `reference.grouped_matmul`, summed in float32, for a stack that `supports` accepts.

    x is bfloat16 or float32 [N, in], sorted by group; the stack [X, out, in]; group_sizes i32 [X], whose sum is at most
    N. The result has x's type, unless `out_dtype` is given.
    """
    plan = _plan(x, stack)
    assert plan is not None
    num_rows, (_, num_outputs, _) = len(x), stack.shape
    padded = jnp.pad(x, ((0, -num_rows % _ROW_MULTIPLE), (0, 0)))
    plan_visits = visits(group_sizes, len(padded), plan.rows, aligned=True)
    scales, scale_specs, scratch = _scale_operands(stack, plan)
    parts, columns = stack.parts, stack.stored_columns
    y = pl.pallas_call(
        functools.partial(_kernel, plan=plan, num_scales=len(_scales(stack)), num_supers=len(_supers(stack))),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(pl.cdiv(num_outputs, plan.outputs), len(plan_visits.groups)),
            in_specs=[
                pl.BlockSpec((parts, plan.rows, columns), lambda _n, v, _groups, tiles, *_: (0, tiles[v], 0)),
                pl.BlockSpec((None, plan.outputs, columns), lambda n, v, groups, *_: (groups[v], n, 0)),
                *scale_specs,
            ],
            out_specs=pl.BlockSpec((plan.rows, plan.outputs), lambda n, v, _groups, tiles, *_: (tiles[v], n)),
            scratch_shapes=[pltpu.VMEM((plan.rows, plan.outputs), jnp.float32), *scratch],
        ),
        out_shape=jax.ShapeDtypeStruct((len(padded), num_outputs), out_dtype or x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        cost_estimate=_cost(x, stack),
        name=f"grouped_matmul_{stack.kind}",
        interpret=interpret,
    )(
        plan_visits.groups,
        plan_visits.first_rows // plan.rows,
        plan_visits.starts,
        plan_visits.ends,
        plan_visits.count,
        by_parts(padded, parts),
        in_hbm(jnp.asarray(stack.elements)),
        *scales,
    )
    is_in_group = jnp.arange(num_rows) < plan_visits.ends[-1]
    return jnp.where(is_in_group[:, None], y[:num_rows], 0)


def _kernel(
    groups: jax.Ref,
    tiles: jax.Ref,
    starts: jax.Ref,
    ends: jax.Ref,
    count: jax.Ref,
    x: jax.Ref,
    elements: jax.Ref,
    *rest: jax.Ref,
    plan: _Plan,
    num_scales: int,
    num_supers: int,
) -> None:
    """Computes one visit: x [P, rows, columns], elements [outputs, columns], out [rows, outputs].

    `rest` is scales and zero points or minima if any, their super scales if any, out, the sum, and float32 scratch.
    """
    scales, rest = rest[:num_scales], rest[num_scales:]
    supers, (out, total, *scratch) = rest[:num_supers], rest[num_supers:]
    visit = pl.program_id(1)

    @pl.when(visit < count[0])
    def _() -> None:
        wide_scales = scratch[:num_scales]
        for wide, scale, factor in itertools.zip_longest(wide_scales, scales, supers):
            if wide is not None:
                values = scale_to_float32(scale[...])
                wide[: scale.shape[0]] = values if factor is None else values * factor[...]
        if plan.chunks_a_scale is None:
            # Outputs first, as elements have them.
            by_outputs = scratch[num_scales:]
            for turned, wide in zip(by_outputs, wide_scales, strict=True):
                turned[:, : wide.shape[0]] = wide[...].T
            wide_scales = by_outputs
        total[...] = jnp.zeros(total.shape, jnp.float32)
        add = functools.partial(_add_chunk, x, elements, scales, wide_scales, total, plan)
        num_chunks, tail = divmod(elements.shape[1], plan.chunk)
        if num_chunks:

            @pl.loop(0, num_chunks)
            def _(chunk: jax.Array) -> None:
                add(chunk, pl.Slice(pl.multiple_of(chunk * plan.chunk, plan.chunk), plan.chunk))

        if tail:
            add(num_chunks, pl.Slice(num_chunks * plan.chunk, tail))
        group = groups[visit]
        row = tiles[visit] * plan.rows + jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
        is_mine = (row >= starts[group]) & (row < ends[group])
        # Visits of other groups write the other rows, before or after this one.
        out[...] = jnp.where(is_mine, total[...], out[...].astype(jnp.float32)).astype(out.dtype)


def _add_chunk(
    x: jax.Ref,
    elements: jax.Ref,
    scales: Sequence[jax.Ref],
    wide_scales: Sequence[jax.Ref],
    total: jax.Ref,
    plan: _Plan,
    chunk: jax.Array | int,
    columns: pl.Slice,
) -> None:
    values = to_floats(elements[:, columns], plan.kind, has_zero_point=plan.offset == "zero_point")
    inputs = [x[part, :, columns] for part in range(len(values))]
    if scales and plan.chunks_a_scale is None:
        scale, *offset = (_each_columns(wide, columns, plan) for wide in wide_scales)
        if plan.offset == "zero_point":
            values = [(value - offset[0]) * scale for value in values]
        elif plan.offset == "minimum":
            values = [value * scale + offset[0] for value in values]
        else:
            values = [value * scale for value in values]
    partial = sum(_product(rows, value.astype(rows.dtype)) for rows, value in zip(inputs, values, strict=True))
    if plan.chunks_a_scale is not None:
        column = chunk // plan.chunks_a_scale
        of_rows = [wide[pl.ds(column, 1), :] for wide in wide_scales]
        sums = 0
        if plan.offset is not None:
            sums = sum(jnp.sum(rows.astype(jnp.float32), axis=1, keepdims=True) for rows in inputs)
        if plan.offset == "zero_point":
            partial = partial - sums * of_rows[1]
        if of_rows:
            partial = partial * of_rows[0]
            if plan.offset == "minimum":
                partial = partial + sums * of_rows[1]
        elif scales:
            partial = partial * scales[0][pl.program_id(0) * plan.outputs // plan.scale_rows, column]
    total[...] += partial


def _each_columns(of_groups: jax.Ref, columns: pl.Slice, plan: _Plan) -> jax.Array:
    """Expands scales [outputs, groups of columns] to those of some stored columns, [outputs, columns]."""
    shared, lanes = plan.stored_columns_a_scale, (plan.outputs, _LANES)
    group_of_lane = jax.lax.broadcasted_iota(jnp.int32, lanes, 1) // shared
    pieces = []
    for column in range(0, columns.size, _LANES):
        # The groups of so many neighbouring columns never lie on both sides of a multiple of _LANES.
        group = (columns.start + column) // shared
        first = group // _LANES * _LANES
        if not isinstance(first, int):
            first = pl.multiple_of(first, _LANES)
        source = of_groups[:, pl.ds(first, _LANES)]
        pieces.append(jnp.take_along_axis(source, group_of_lane + (group - first), axis=1))
    return jnp.concatenate(pieces, axis=1)[:, : columns.size]


def _product(rows: jax.Array, values: jax.Array) -> jax.Array:
    precision = "highest" if rows.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        rows, values, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _plan(x: jax.Array | jax.ShapeDtypeStruct, stack: StoredStack) -> _Plan | None:
    (num_groups, num_outputs, _), columns = stack.shape, stack.stored_columns
    scale_rows, shared = stack.block_shape[0], stack.stored_columns_a_scale
    outputs = _largest_block(num_outputs, columns * stack.elements.dtype.itemsize)
    if min(outputs, num_outputs) * columns * stack.elements.dtype.itemsize > _LONGEST_BLOCK_BYTES:
        return None
    if stack.scale is not None and 1 < scale_rows < num_outputs:
        # A block of outputs has one row of scales.
        outputs = math.gcd(_MOST_OUTPUTS, scale_rows)
        if outputs % _LANES:
            return None
    chunk, chunks_a_scale = _CHUNK, None
    if shared >= columns:
        chunks_a_scale = columns
    elif shared % _LANES == 0:
        chunk = math.gcd(shared, _CHUNK)
        chunks_a_scale = shared // chunk
    elif scale_rows == 1 and _LANES % shared == 0:
        chunk = _CHUNK // 2  # there is more code for each column
    else:
        return None
    rows = _tile_rows(x.shape[0], num_groups, stack.shape[2] * x.dtype.itemsize)
    offset = "zero_point" if stack.zero_point is not None else "minimum" if stack.minimum is not None else None
    return _Plan(stack.kind, outputs, rows, chunk, chunks_a_scale, offset, shared, scale_rows)


def _largest_block(num_outputs: int, row_bytes: int) -> int:
    outputs = _MOST_OUTPUTS
    while outputs > _LANES and (outputs * row_bytes > _BLOCK_BYTES or outputs >= 2 * num_outputs):
        outputs //= 2
    return outputs if num_outputs > outputs else num_outputs


def _tile_rows(num_rows: int, num_groups: int, row_bytes: int) -> int:
    """Returns the rows of a tile: a group's average, but enough for the matrix unit and not too many for VMEM."""
    average = 1 << (num_rows // num_groups).bit_length()
    most = max(_ROW_MULTIPLE, _BLOCK_BYTES // row_bytes // _ROW_MULTIPLE * _ROW_MULTIPLE)
    rows = min(max(average, _LANES), _MOST_ROWS, most)
    return min(rows, -(-num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE)


def _scale_operands(stack: StoredStack, plan: _Plan) -> tuple[list[jax.Array], list[pl.BlockSpec], list[Any]]:
    """Returns arrays of scales and offsets, their block specifications, and scratch for their float32 values."""
    arrays, supers = _scales(stack), _supers(stack)
    if not arrays:
        return [], [], []
    if plan.scale_rows > 1:
        (scale,) = arrays
        spec = pl.BlockSpec(
            (None, *scale.shape[1:]), lambda _n, v, groups, *_: (groups[v], 0, 0), memory_space=pltpu.SMEM
        )
        return [in_hbm(scale.astype(jnp.float32))], [spec], []
    groups_of_columns = arrays[0].shape[2]
    # Outputs last: `weight_layout` keeps scales in this order.
    spec = pl.BlockSpec((None, groups_of_columns, plan.outputs), lambda n, v, groups, *_: (groups[v], 0, n))
    padded = pl.cdiv(groups_of_columns, _SUBLANES) * _SUBLANES
    scratch = [pltpu.VMEM((padded, plan.outputs), jnp.float32)] * len(arrays)
    if plan.chunks_a_scale is None:
        padded = pl.cdiv(groups_of_columns, _LANES) * _LANES
        scratch += [pltpu.VMEM((plan.outputs, padded), jnp.float32)] * len(arrays)
    of_supers = pl.BlockSpec((None, 1, plan.outputs), lambda n, v, groups, *_: (groups[v], 0, n))
    operands = [in_hbm(_loadable(array).swapaxes(1, 2)) for array in (*arrays, *supers)]
    return operands, [spec] * len(arrays) + [of_supers] * len(supers), scratch


def _loadable(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.uint16) if array.dtype == jnp.float16 else array


def _scales(stack: StoredStack) -> list[jax.Array]:
    return [jnp.asarray(array) for array in (stack.scale, stack.zero_point, stack.minimum) if array is not None]


def _supers(stack: StoredStack) -> list[jax.Array]:
    return [jnp.asarray(array) for array in (stack.super_scale, stack.super_minimum) if array is not None]


def _cost(x: jax.Array, stack: StoredStack) -> pl.CostEstimate:
    num_groups, num_outputs, num_features = stack.shape
    used = min(num_groups, len(x)) / num_groups
    weights = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(stack))
    activations = len(x) * (num_outputs + num_features) * x.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * len(x) * num_outputs * num_features,
        bytes_accessed=int(weights * used) + activations,
        transcendentals=0,
    )
