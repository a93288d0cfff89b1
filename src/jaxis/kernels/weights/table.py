"""The table of operations for each type of weight: the one place to look them up, and to add a new type.

Platforms are selected here too: PackedWeight is the layout of the native CPU kernels, and everything else runs on XLA
on any platform, or in the kernels of grouped products on TPU and GPU (`grouped.py`, `narrow.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.native_constants import MAX_MATRICES
from jaxis.kernels.platform import can_call_kernels, target_platform
from jaxis.kernels.quantized_matmul import packed, quantized_matmul, reference
from jaxis.kernels.quantized_matmul.block_scaled import BlockScaledWeight, block_scaled_matmul, dequantize_blocks
from jaxis.kernels.quantized_matmul.coded import (
    CodedWeight,
    coded_matmul,
    dequantize_codes,
    round_input_of_codes,
)
from jaxis.kernels.quantized_matmul.packed import Allocate, PackedWeight
from jaxis.kernels.quantized_matmul.reordered import ReorderedWeight, reorder, restore_order
from jaxis.kernels.quantized_matmul.weight import QuantizedWeight
from jaxis.kernels.weights.functions import dequantize, lookup, matmul
from jaxis.kernels.weights.grouped import experts_by_groups, experts_packed
from jaxis.kernels.weights.narrow import narrow_matmul
from jaxis.kernels.weights.operations import Operations, operations_of, register


def _matmul_array(x: jax.Array, weight: jax.Array, preferred_element_type: DTypeLike | None) -> jax.Array:
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=preferred_element_type)


def _lookup_array(ids: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    return _take_rows(weight, ids).astype(dtype)


def _pack_array(weight: jax.Array | np.ndarray, dtype: DTypeLike, allocate: Allocate | None) -> PackedWeight:
    array = np.asarray(weight)
    # For a float32 model, bfloat16 weights stay bfloat16; the kernels upcast them in registers.
    return packed.pack(array.astype(dtype, copy=False) if dtype == ml_dtypes.bfloat16 else array, allocate)


def _matmul_quantized(x: jax.Array, weight: QuantizedWeight, preferred_element_type: DTypeLike | None) -> jax.Array:
    return narrow_matmul(_multiply_quantized, x, weight, preferred_element_type)


def _multiply_quantized(x: jax.Array, weight: QuantizedWeight, preferred_element_type: DTypeLike | None) -> jax.Array:
    return quantized_matmul(x, weight, act_qtype=weight.act_qtype, preferred_element_type=preferred_element_type)


def _lookup_quantized(ids: jax.Array, weight: QuantizedWeight, dtype: DTypeLike) -> jax.Array:
    return reference.dequantize(jax.tree.map(lambda array: _take_rows(array, ids), weight), dtype)


def _pack_quantized(weight: QuantizedWeight, _: DTypeLike, allocate: Allocate | None) -> PackedWeight | None:
    return packed.pack_quantized(weight, allocate) if packed.can_pack(weight) else None


def _round_input_of_quantized(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    return x if weight.act_qtype is None else reference.round_activations(x)


def _matmul_blocks(x: jax.Array, weight: BlockScaledWeight, preferred_element_type: DTypeLike | None) -> jax.Array:
    return narrow_matmul(_multiply_blocks, x, weight, preferred_element_type)


def _multiply_blocks(x: jax.Array, weight: BlockScaledWeight, preferred_element_type: DTypeLike | None) -> jax.Array:
    return block_scaled_matmul(x, weight, preferred_element_type=preferred_element_type)


def _lookup_blocks(ids: jax.Array, weight: BlockScaledWeight, dtype: DTypeLike) -> jax.Array:
    rows, columns = weight.block_shape
    ids = jnp.clip(ids, 0, weight.shape[0] - 1)
    of_rows = BlockScaledWeight(_take_rows(weight.value, ids), _take_rows(weight.scale, ids // rows), (1, columns))
    return dequantize_blocks(of_rows, dtype)


def _pack_blocks(weight: BlockScaledWeight, _: DTypeLike, allocate: Allocate | None) -> PackedWeight | None:
    return packed.pack_blocks(weight, allocate) if packed.can_pack(weight) else None


def _matmul_codes(x: jax.Array, weight: CodedWeight, preferred_element_type: DTypeLike | None) -> jax.Array:
    return narrow_matmul(_multiply_codes, x, weight, preferred_element_type)


def _multiply_codes(x: jax.Array, weight: CodedWeight, preferred_element_type: DTypeLike | None) -> jax.Array:
    return coded_matmul(x, weight, preferred_element_type=preferred_element_type)


def _lookup_codes(ids: jax.Array, weight: CodedWeight, dtype: DTypeLike) -> jax.Array:
    return dequantize_codes(jax.tree.map(lambda array: _take_rows(array, ids), weight), dtype)


def _matmul_packed(x: jax.Array, weight: PackedWeight, preferred_element_type: DTypeLike | None) -> jax.Array:
    (y,) = packed.matmul(x.astype(jnp.float32), [weight], act_qtype=weight.act_qtype)
    return y.astype(preferred_element_type or x.dtype)


def _lookup_packed(ids: jax.Array, weight: PackedWeight, dtype: DTypeLike) -> jax.Array:
    return packed.lookup(ids, weight).astype(dtype)


def _dequantize_packed(weight: PackedWeight, dtype: DTypeLike) -> jax.Array:
    return _lookup_packed(jnp.arange(weight.shape[0], dtype=jnp.int32), weight, dtype)


def _fused_matmul_packed(x: jax.Array, weights: Sequence[PackedWeight]) -> list[jax.Array] | None:
    if len(weights) > MAX_MATRICES or len({weight.format for weight in weights}) != 1:
        return None
    results = packed.matmul(x.astype(jnp.float32), weights, act_qtype=weights[0].act_qtype)
    return [y.astype(x.dtype) for y in results]


def _gated_matmul_packed(x: jax.Array, gate: PackedWeight, up: PackedWeight, activation: str) -> jax.Array | None:
    if gate.format != up.format or gate.shape != up.shape:
        return None
    (y,) = packed.matmul(x.astype(jnp.float32), [gate, up], act_qtype=gate.act_qtype, activation=activation)
    return y.astype(x.dtype)


def _matmul_reordered(x: jax.Array, weight: ReorderedWeight, preferred_element_type: DTypeLike | None) -> jax.Array:
    return matmul(reorder(x, weight), weight.weight, preferred_element_type=preferred_element_type)


def _lookup_reordered(ids: jax.Array, weight: ReorderedWeight, dtype: DTypeLike) -> jax.Array:
    return restore_order(lookup(ids, weight.weight, dtype), weight)


def _dequantize_reordered(weight: ReorderedWeight, dtype: DTypeLike) -> jax.Array:
    return restore_order(dequantize(weight.weight, dtype), weight)


def _pack_reordered(weight: ReorderedWeight, dtype: DTypeLike, allocate: Allocate | None) -> ReorderedWeight | None:
    inner = operations_of(weight.weight).pack(weight.weight, dtype, allocate)
    return dataclasses.replace(weight, weight=inner) if isinstance(inner, PackedWeight) else None


def _take_rows(array: jax.Array | np.ndarray, ids: jax.Array) -> jax.Array:
    if target_platform() == "tpu":
        return _take_rows_on_tpu(jnp.asarray(array), ids)
    return jnp.take(jnp.asarray(array), ids, axis=0, mode="clip")


def _take_rows_on_tpu(array: jax.Array, ids: jax.Array) -> jax.Array:
    if can_call_kernels():
        # Imported here because Pallas takes long to import.
        from jaxis.kernels.weights import rows_tpu

        if rows_tpu.supports(array, ids):
            return rows_tpu.take_rows(array, ids)
    if len(ids) > 1 or array.dtype.itemsize > 1:
        return jnp.take(array, ids, axis=0, mode="clip")
    # XLA slices a single row, for which it copies a whole table of bytes into tiles of other sizes; two it gathers.
    return jnp.take(array, jnp.pad(ids, (0, 1)), axis=0, mode="clip")[:1]


_ARRAY = Operations(
    matmul=_matmul_array,
    lookup=_lookup_array,
    dequantize=lambda weight, dtype: jnp.asarray(weight).astype(dtype),
    pack=_pack_array,
    experts=experts_by_groups,
)

TABLE: dict[type, Operations] = {
    jax.Array: _ARRAY,
    np.ndarray: _ARRAY,
    QuantizedWeight: Operations(
        matmul=_matmul_quantized,
        lookup=_lookup_quantized,
        dequantize=reference.dequantize,
        pack=_pack_quantized,
        experts=experts_by_groups,
        round_input=_round_input_of_quantized,
    ),
    BlockScaledWeight: Operations(
        matmul=_matmul_blocks,
        lookup=_lookup_blocks,
        dequantize=dequantize_blocks,
        pack=_pack_blocks,
        experts=experts_by_groups,
    ),
    CodedWeight: Operations(
        matmul=_matmul_codes,
        lookup=_lookup_codes,
        dequantize=dequantize_codes,
        pack=lambda weight, _, allocate: packed.pack_coded(weight, allocate),
        experts=experts_by_groups,
        round_input=round_input_of_codes,
    ),
    PackedWeight: Operations(
        matmul=_matmul_packed,
        lookup=_lookup_packed,
        dequantize=_dequantize_packed,
        pack=lambda weight, *_: weight,
        experts=experts_packed,
        fused_matmul=_fused_matmul_packed,
        gated_matmul=_gated_matmul_packed,
    ),
    ReorderedWeight: Operations(
        matmul=_matmul_reordered,
        lookup=_lookup_reordered,
        dequantize=_dequantize_reordered,
        pack=_pack_reordered,
        experts=experts_by_groups,
    ),
}

for _kind, _operations in TABLE.items():
    register(_kind, _operations)
