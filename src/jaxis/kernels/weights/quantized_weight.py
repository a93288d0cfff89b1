from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxis.kernels.grouped_matmul.stored import INT4_OFFSET, StoredStack
from jaxis.kernels.weights.packed_format import (
    GROUP_SIZES,
    PackedFormat,
    PanelSources,
    kernel_group,
    kernel_scales,
    repeat,
)
from jaxis.kernels.weights.packed_weight import PackedWeight, pack_panels
from jaxis.kernels.weights.quantized_activations import round_activations
from jaxis.kernels.weights.scale_codes import find_codes
from jaxis.kernels.weights.weight import Allocate, Weight


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedWeight(Weight):
    """A weight [out, in], or a stack of weights, as `scale * (qvalue - zero_point)`, one scale for each group of a row.

    Attributes:
      qvalue: int8 [..., out, in]; or uint8 [..., out, in / 2], two unsigned 4-bit elements per byte, the earlier in the
        low nibble.
      scale: [..., out, groups], each for in / groups neighbouring columns; float32 if a row is one group, else bfloat16
        (or float32 or float16, in some checkpoints).
      zero_point: uint8 [..., out, groups], int4 only. None means symmetric: int8 is stored as it is, int4 with
        INT4_OFFSET added.
      act_qtype: "int8" quantizes the input of the weight's products dynamically; None does not.
    """

    qvalue: jax.Array | np.ndarray
    scale: jax.Array | np.ndarray
    zero_point: jax.Array | np.ndarray | None = None
    act_qtype: str | None = field(default=None, metadata={"static": True})

    @property
    def qtype(self) -> str:
        return "int8" if self.qvalue.dtype == np.int8 else "int4"

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, columns = self.qvalue.shape
        return (*leading, columns if self.qtype == "int8" else 2 * columns)

    @property
    def group_size(self) -> int:
        return self.shape[-1] // self.scale.shape[-1]

    @property
    def storage(self) -> str:
        return self.qtype

    @property
    def packed_nbytes(self) -> int:
        if self.qtype == "int4" or self.scale.shape[1] == 1:
            return self.nbytes
        # The scales of int8 groups become codes of 8 bits, with a float32 for each row.
        return self.qvalue.nbytes + self.scale.size + 4 * len(self.scale)

    @property
    def quantizes_input(self) -> bool:
        return self.act_qtype is not None

    @property
    def column_major_arrays(self) -> frozenset[str]:
        return frozenset({"scale", "zero_point"})

    def matmul(self, x: jax.Array, preferred_element_type: DTypeLike | None = None) -> jax.Array:
        """Computes a single XLA product, which `reference.quantized_matmul` defines term by term.

        Scales are folded into their factors: the activation's into the activation; the weight's into the result if a
        row has one scale, else into the weight. This rounds differently from the definition, by about the rounding
        error of x's type.
        """
        out_dtype = preferred_element_type or x.dtype
        x = self.round_input(x)
        if self.qtype == "int8" and self.scale.shape[1] == 1:
            # int8 is exact in every float type, and XLA upcasts it while reading.
            y = jnp.einsum("...i,oi->...o", x, self.qvalue.astype(x.dtype), preferred_element_type=jnp.float32)
            return (y * self.scale[:, 0]).astype(out_dtype)
        return jnp.einsum("...i,oi->...o", x, self.dequantize(x.dtype), preferred_element_type=out_dtype)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        q = self.integers()
        grouped = q.reshape(*self.scale.shape, -1) * self.scale.astype(jnp.float32)[..., None]
        return grouped.reshape(q.shape).astype(dtype)

    def integers(self) -> jax.Array:
        """Returns qvalue - zero_point, float32 [..., out, in]."""
        q = jnp.asarray(self.qvalue)
        if self.qtype == "int8":
            return q.astype(jnp.float32)
        q = jnp.stack([q & 0xF, q >> 4], axis=-1).astype(jnp.float32)
        zero_point = INT4_OFFSET if self.zero_point is None else self.zero_point.astype(jnp.float32)[..., None]
        return (q.reshape(*self.scale.shape, -1) - zero_point).reshape(self.shape)

    def round_input(self, x: jax.Array) -> jax.Array:
        return x if self.act_qtype is None else round_activations(x)

    def with_quantized_input(self, act_qtype: str) -> Self:
        return dataclasses.replace(self, act_qtype=act_qtype)

    def kernel_stack(self) -> StoredStack | None:
        columns = self.group_size
        if self.qtype == "int4" and columns % 2:
            return None
        return StoredStack(self.qvalue, self.scale, self.zero_point, kind=self.qtype, block_shape=(1, columns))

    def pack(self, dtype: DTypeLike = jnp.float32, allocate: Allocate | None = None) -> PackedWeight | None:
        rows, columns = self.shape
        scale, is_one_group = np.asarray(self.scale), self.scale.shape[1] == 1
        if is_one_group and self.qtype == "int8":
            weight_format = PackedFormat("int8", columns, act_qtype=self.act_qtype)
            sources = PanelSources(np.asarray(self.qvalue), scale.astype(np.float32, copy=False))
            return pack_panels(rows, weight_format, sources, allocate)
        # The kernels have no int4 with one scale per row: its groups are cut, and their scales repeat.
        group_size = kernel_group(columns, self.group_size)
        if group_size is None or not (is_one_group or self.group_size in GROUP_SIZES):
            return None
        bits, scale, unit = int(self.qtype.removeprefix("int")), kernel_scales(scale), None
        # Only int8 scales: jaxis quantizes int4 with others, which would be codes by chance only.
        if bits == 8 and (found := find_codes(scale)) is not None:
            scale, unit = found
        repeats = self.group_size // group_size
        zero_point = None if self.zero_point is None else repeat(np.asarray(self.zero_point), repeats)
        weight_format = PackedFormat(
            "codes",
            columns,
            group_size,
            bits=bits,
            offset=0 if zero_point is not None else 1 << (bits - 1),
            scale=scale.dtype.name,
            has_zero_points=zero_point is not None,
            super_scale="none" if unit is None else unit.dtype.name,
            super_block=0 if unit is None else columns,
            act_qtype=self.act_qtype,
        )
        sources = PanelSources(
            np.asarray(self.qvalue), repeat(scale, repeats), bits, zero_point=zero_point, super_scale=unit
        )
        return pack_panels(rows, weight_format, sources, allocate)
