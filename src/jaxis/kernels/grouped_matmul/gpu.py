"""The grouped product on NVIDIA GPUs: a Pallas Triton kernel that reads stored weights, and only of groups with rows.

A program multiplies one tile of one group's rows with a block of outputs. The weights are the left factor, so that the
matrix instruction does not depend on the number of rows, and each result is summed over the features in one order.
Since one group of few outputs would not occupy a GPU, its features are divided into splits too. Each split has a
program of its own if there are few rows; otherwise one program computes them in turn, with the same sums.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from jaxis.kernels.grouped_matmul.elements import e4m3_to_float32, e8m0_to_float32, scale_to_float32, to_floats
from jaxis.kernels.grouped_matmul.stored import StoredStack
from jaxis.kernels.grouped_matmul.visits import visits

_OUTPUTS = 64  # of a block: the rows of Hopper's matrix instruction
_FEWEST_ROWS, _MOST_ROWS = 16, 128  # of a tile
_CHUNK = 64  # stored columns of a step
_PROGRAMS, _MOST_SPLITS, _CHUNKS_A_SPLIT = 256, 8, 8  # wanted programs; most splits; chunks of the smallest split
_FEW_ROWS = 64  # the most rows for which splits have programs, and sums in memory, of their own
_WARPS, _STAGES = 4, 3


@dataclass(frozen=True)
class _Plan:
    """Sizes of a product's tiles, all powers of two.

    Attributes:
      rows: Rows of a tile.
      chunk: Stored columns of a step.
      columns_a_scale: Stored columns that share a scale; None if a row has one scale.
      scale_rows: Outputs that share a scale.
      has_exponents: True if scales are the bits of float8_e8m0fnu.
      splits: Number of parts into which the features are divided.
      splits_between_programs: True if each split has a program of its own.
    """

    kind: str
    parts: int
    rows: int
    chunk: int
    columns_a_scale: int | None
    scale_rows: int
    has_exponents: bool
    splits: int
    splits_between_programs: bool


def supports(x: jax.Array | jax.ShapeDtypeStruct, stack: StoredStack) -> bool:
    """Returns whether the kernel takes rows x [N, in] and these weights."""
    if stack.kind == "uint4":
        return False
    return x.dtype in (jnp.bfloat16, jnp.float16, jnp.float32) and x.shape[0] > 0 and _plan(x, stack) is not None


def xla_dequantizes_in_memory(stack: StoredStack) -> bool:
    """Returns whether XLA would dequantize this weight in memory before a product; see docs/accelerators.md."""
    return stack.scale is not None and (stack.kind != "int8" or stack.scale.shape[2] > 1)


def grouped_matmul(
    x: jax.Array,
    stack: StoredStack,
    group_sizes: jax.Array,
    *,
    out_dtype: DTypeLike | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes `reference.grouped_matmul`, summed in float32, for a stack that `supports` accepts.

    x is [N, in], sorted by group; the stack [X, out, in]; group_sizes i32 [X], whose sum is at most N. The result has
    x's type, unless `out_dtype` is given.
    """
    plan, out_dtype = _plan(x, stack), out_dtype or x.dtype
    assert plan is not None
    num_rows, (_, num_outputs, _) = len(x), stack.shape
    tiles = visits(group_sizes, num_rows, plan.rows, aligned=False)
    scales = [array for array in (stack.scale, stack.zero_point) if array is not None]
    num_sums = plan.splits if plan.splits_between_programs else 1
    sums = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=(len(tiles.groups), pl.cdiv(num_outputs, _OUTPUTS), num_sums),
        out_shape=jax.ShapeDtypeStruct((num_sums, num_rows, num_outputs), out_dtype if num_sums == 1 else jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        name=f"grouped_matmul_{stack.kind}",
        interpret=interpret,
    )(
        tiles.groups,
        tiles.first_rows,
        tiles.ends,
        tiles.count,
        stack.elements,
        *(x[:, part :: plan.parts] for part in range(plan.parts)),
        # Triton does not know powers of two as numbers.
        *(jax.lax.bitcast_convert_type(a, jnp.uint8) if a.dtype == jnp.float8_e8m0fnu else a for a in scales),
    )
    y = functools.reduce(jnp.add, sums).astype(out_dtype)  # one after the other, as a single program adds them
    is_in_group = jnp.arange(num_rows) < tiles.ends[-1]
    return jnp.where(is_in_group[:, None], y, 0)


def _kernel(
    groups: jax.Ref,
    first_rows: jax.Ref,
    ends: jax.Ref,
    count: jax.Ref,
    elements: jax.Ref,
    *rest: jax.Ref,
    plan: _Plan,
) -> None:
    """Computes one visit, block of outputs and split of the features.

    `elements` are [X, out, columns]. `rest` is the rows, [N, columns] for each of the P elements of an entry, then
    scales and zero points if any, then out [sums, N, out].
    """
    inputs, (*scales, out) = rest[: plan.parts], rest[plan.parts :]
    visit, block, program_of_split = (pl.program_id(axis) for axis in range(3))

    @pl.when(visit < count[0])
    def _() -> None:
        group, first_row, first_output = groups[visit], first_rows[visit], block * _OUTPUTS
        is_row = first_row + jnp.arange(plan.rows) < ends[group]
        is_output = first_output + jnp.arange(_OUTPUTS) < elements.shape[1]
        num_columns = elements.shape[2]
        load_scales = functools.partial(_load_scales, scales, plan, group, first_output, is_output)

        def add_chunk(chunk: jax.Array, total: jax.Array) -> jax.Array:
            columns = pl.ds(chunk * plan.chunk, plan.chunk)
            is_column = chunk * plan.chunk + jnp.arange(plan.chunk) < num_columns
            place = elements.at[group, pl.ds(first_output, _OUTPUTS), columns]
            stored = _load(place, is_output[:, None] & is_column[None, :])
            if plan.kind == "e4m3":
                values = [e4m3_to_float32(stored)]
            else:
                values = to_floats(stored, plan.kind, has_zero_point=len(scales) > 1)
            if plan.columns_a_scale is not None:
                values = _scaled(values, load_scales(chunk))
            for value, x in zip(values, inputs, strict=True):
                rows = _load(x.at[pl.ds(first_row, plan.rows), columns], is_row[:, None] & is_column[None, :])
                precision = "highest" if rows.dtype == jnp.float32 else None
                total += plgpu.dot(value.astype(rows.dtype), rows, trans_b=True, precision=precision)
            return total

        def sum_of(split: jax.Array | int) -> jax.Array:
            num_chunks = pl.cdiv(num_columns, plan.chunk)
            chunks_a_split = pl.cdiv(num_chunks, plan.splits)
            first = split * chunks_a_split
            end = jnp.minimum(first + chunks_a_split, num_chunks)
            total = jax.lax.fori_loop(first, end, add_chunk, jnp.zeros((_OUTPUTS, plan.rows), jnp.float32))
            return total * load_scales(0)[0] if scales and plan.columns_a_scale is None else total

        if plan.splits_between_programs or plan.splits == 1:
            total = sum_of(program_of_split)
        else:
            total = jax.lax.fori_loop(1, plan.splits, lambda split, total: total + sum_of(split), sum_of(0))
        plgpu.store(
            out.at[program_of_split, pl.ds(first_row, plan.rows), pl.ds(first_output, _OUTPUTS)],
            total.T.astype(out.dtype),
            mask=is_row[:, None] & is_output[None, :],
        )


def _load(place: Any, mask: jax.Array) -> jax.Array:
    """Loads elements, and 0 where the mask is false; 8-bit floats, which not every GPU has, as their bits."""
    if place.dtype.itemsize > 1 or not jnp.issubdtype(place.dtype, jnp.floating):
        return plgpu.load(place, mask=mask, other=0)
    bits = jax.lax.bitcast_convert_type(plgpu.load(place, mask=mask), jnp.uint8)
    return jnp.where(mask, bits, 0)


def _scaled(values: Sequence[jax.Array], scales: Sequence[jax.Array]) -> list[jax.Array]:
    scale, *zero_point = scales
    return [(value - zero_point[0] if zero_point else value) * scale for value in values]


def _load_scales(
    scales: Sequence[jax.Ref],
    plan: _Plan,
    group: jax.Array,
    first_output: jax.Array,
    is_output: jax.Array,
    chunk: jax.Array | int,
) -> list[jax.Array]:
    """Returns the scales, and zero points if any, of a chunk's elements: [outputs, columns or 1]."""
    row = (first_output + jnp.arange(_OUTPUTS)) // plan.scale_rows
    columns = jnp.zeros(1, jnp.int32)
    if plan.columns_a_scale is not None:
        shared = min(plan.columns_a_scale, plan.chunk)
        columns = chunk * plan.chunk // plan.columns_a_scale + jnp.arange(plan.chunk // shared)
    result = []
    for array in scales:
        is_there = is_output[:, None] & (columns < array.shape[2])[None, :]
        indices = (jnp.broadcast_to(index, is_there.shape) for index in (row[:, None], columns[None, :]))
        stored = _load(array.at[group, *indices], is_there)
        wide = e8m0_to_float32(stored) if plan.has_exponents else scale_to_float32(stored)
        if 1 < wide.shape[1] < plan.chunk:
            repeats = plan.chunk // wide.shape[1]
            wide = jnp.broadcast_to(wide[:, :, None], (*wide.shape, repeats)).reshape(_OUTPUTS, plan.chunk)
        result.append(wide)
    return result


def _plan(x: jax.Array | jax.ShapeDtypeStruct, stack: StoredStack) -> _Plan | None:
    num_groups = stack.shape[0]
    rows = min(max(1 << (x.shape[0] // num_groups).bit_length(), _FEWEST_ROWS), _MOST_ROWS)
    columns_a_scale: int | None = stack.stored_columns_a_scale
    if columns_a_scale >= stack.stored_columns:
        # The sum is scaled; unless elements have to be shifted first, and then the scale is for all chunks.
        columns_a_scale = None if stack.zero_point is None else pl.cdiv(columns_a_scale, _CHUNK) * _CHUNK
    elif math.gcd(columns_a_scale, _CHUNK) != min(columns_a_scale, _CHUNK):
        return None
    has_exponents = stack.scale is not None and stack.scale.dtype == jnp.float8_e8m0fnu
    splits = _splits(stack)
    return _Plan(
        kind=stack.kind,
        parts=stack.parts,
        rows=rows,
        chunk=_CHUNK,
        columns_a_scale=columns_a_scale,
        scale_rows=stack.block_shape[0],
        has_exponents=has_exponents,
        splits=splits,
        splits_between_programs=splits > 1 and x.shape[0] <= _FEW_ROWS,
    )


def _splits(stack: StoredStack) -> int:
    """Returns the number of splits. It must not depend on the number of rows: sums would differ."""
    num_groups, num_outputs, _ = stack.shape
    if num_groups > 1:
        return 1
    wanted = _PROGRAMS // pl.cdiv(num_outputs, _OUTPUTS)
    return max(1, min(wanted, _MOST_SPLITS, stack.stored_columns // (_CHUNK * _CHUNKS_A_SPLIT)))
