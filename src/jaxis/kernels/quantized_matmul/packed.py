"""Weights packed for the native kernels on CPU, and the products with them.

Their layout is described in native/src/matmul.h. They are for inference only: their products have no derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxis.kernels import native, native_memory
from jaxis.kernels.host_threads import for_each_part
from jaxis.kernels.native_constants import ACTIVATIONS, PANEL_ROWS
from jaxis.kernels.quantized_matmul import quantize_native
from jaxis.kernels.quantized_matmul.block_scaled import BlockScaledWeight
from jaxis.kernels.quantized_matmul.coded import CodedWeight
from jaxis.kernels.quantized_matmul.pack_codes import CodeSources, kernel_group, sources_of_codes, sources_of_integers
from jaxis.kernels.quantized_matmul.packed_format import PackedFormat
from jaxis.kernels.quantized_matmul.quantize import NOT_FINITE, check_quantizable
from jaxis.kernels.quantized_matmul.weight import BITS, QuantizedWeight, WeightScheme

GROUP_SIZES = (32, 64, 128)
_PANELS_PER_TASK_BYTES = 1 << 20

Allocate = Callable[[tuple[int, int]], np.ndarray]
"""Memory for a weight's panels: (panels, panel's bytes) -> uint8 array of that shape."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedWeight:
    """A weight [out, in], or a stack of weights.

    Attributes:
      data: uint8 [..., panels, panel's bytes]: 32 rows a panel.
      shape: (out, in) of each weight.
      format: What weights must share to be multiplied in one kernel call.
    """

    data: jax.Array | np.ndarray
    shape: tuple[int, int] = field(metadata={"static": True})
    format: PackedFormat = field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.data.nbytes

    @property
    def qtype(self) -> str:
        """A key of WEIGHT_TYPES."""
        return self.format.qtype

    @property
    def act_qtype(self) -> str | None:
        """ "int8" quantizes the input of its products dynamically; None does not."""
        return self.format.act_qtype


def pack(weight: np.ndarray, allocate: Allocate | None = None) -> PackedWeight:
    """Packs a weight [out, in]: bfloat16 stays so, every other type becomes float32.

    Args:
      weight: The weight.
      allocate: Allocates the memory, which becomes the result's data as it is. None allocates new memory and wraps it
        in a JAX array.
    """
    qtype = "bfloat16" if weight.dtype == ml_dtypes.bfloat16 else "float32"
    if qtype == "float32":
        weight = weight.astype(np.float32, copy=False)
    return _pack(weight.shape, PackedFormat(qtype, weight.shape[1]), weight, None, allocate)


def can_pack(weight: QuantizedWeight | BlockScaledWeight | CodedWeight) -> bool:
    """Whether the kernels take this weight."""
    if isinstance(weight, CodedWeight):
        return sources_of_codes(weight) is not None
    if isinstance(weight, BlockScaledWeight):
        rows, columns = weight.block_shape
        if weight.qtype == "float4_e2m1fn":
            is_whole = weight.shape[-1] % columns == 0 and columns in GROUP_SIZES
            return rows == 1 and is_whole and weight.scale.dtype == ml_dtypes.float8_e8m0fnu
        return columns % 2 == 0
    return has_kernel(weight.qtype, weight.shape[1], None if weight.scale.shape[1] == 1 else weight.group_size)


def has_kernel(qtype: str, in_size: int, group_size: int | None) -> bool:
    """Whether the kernels take quantized weights with `in_size` columns, `group_size` (None: all) to a scale."""
    if group_size in (None, in_size) and (qtype == "int8" or kernel_group(in_size, in_size) is not None):
        return True
    return (group_size or in_size) in GROUP_SIZES


def pack_quantized(weight: QuantizedWeight, allocate: Allocate | None = None) -> PackedWeight:
    """Like `pack`, for a weight that `can_pack` accepts; elements, scales and zero points keep their values."""
    is_one_group = weight.scale.shape[1] == 1
    if is_one_group and weight.qtype == "int8":
        scale = np.asarray(weight.scale).astype(np.float32, copy=False)
        weight_format = PackedFormat("int8", weight.shape[1], act_qtype=weight.act_qtype)
        return _pack(weight.shape, weight_format, np.asarray(weight.qvalue), scale, allocate)
    # The kernels have no int4 with one scale per row: its groups are cut.
    group_size = kernel_group(weight.shape[1], weight.group_size)
    assert group_size is not None
    return _pack_codes(weight.shape, *sources_of_integers(weight, group_size), allocate)


def pack_coded(weight: CodedWeight, allocate: Allocate | None = None) -> PackedWeight | None:
    """Like `pack`; elements keep their values. None if the kernels do not take the weight."""
    sources = sources_of_codes(weight)
    return None if sources is None else _pack_codes(weight.shape, *sources, allocate)


def pack_blocks(weight: BlockScaledWeight, allocate: Allocate | None = None) -> PackedWeight:
    """Like `pack`, for a weight that `can_pack` accepts; elements keep their values, fp8 scales become float32."""
    rows, columns = weight.block_shape
    scale = np.asarray(weight.scale)
    if weight.qtype == "float8_e4m3fn":
        scale = np.repeat(scale.astype(np.float32), rows, axis=0)[: weight.shape[0]]
    weight_format = PackedFormat(weight.qtype, weight.shape[1], columns)
    return _pack(weight.shape, weight_format, np.asarray(weight.value), scale, allocate)


def quantize_and_pack(
    weight: np.ndarray, scheme: WeightScheme, allocate: Allocate | None = None
) -> PackedWeight | None:
    """`pack_quantized(quantize(weight, scheme), allocate)`, in one pass over the weight.

    Returns None if the kernels do not take the weight, or no native code can quantize it.

    Raises:
      ValueError: See `quantize`.
    """
    in_size, qtype = weight.shape[1], scheme.weight_qtype
    check_quantizable(in_size, scheme)
    is_whole_row = scheme.group_size is None and qtype == "int8"
    is_grouped = scheme.group_size in GROUP_SIZES and scheme.group_size < in_size
    if not (is_whole_row or is_grouped) or weight.size == 0 or not quantize_native.usable(weight):
        return None
    weight_format = _format_of(in_size, scheme)
    panels = _empty_panels(weight.shape, weight_format, allocate)
    if not quantize_native.quantize_panels(weight, scheme, panels, PANEL_ROWS):
        raise ValueError(NOT_FINITE)
    return PackedWeight(panels if allocate is not None else device_array(panels), weight.shape, weight_format)


def _format_of(in_size: int, scheme: WeightScheme) -> PackedFormat:
    """The format of weights that `quantize_and_pack` makes; native/src/quantize.cc has the same."""
    if scheme.group_size is None:
        return PackedFormat("int8", in_size, act_qtype=scheme.act_qtype)
    bits, method = BITS[scheme.weight_qtype], scheme.weight_calibration_method
    has_units = bits == 8 or method == "affine"
    return PackedFormat(
        "codes",
        in_size,
        scheme.group_size,
        bits=bits,
        offset=0 if method in ("minmax", "affine") else 1 << (bits - 1),
        scale="uint8" if has_units else "bfloat16",
        minimum="int8" if method == "affine" else "none",
        has_zero_points=method == "minmax",
        super_scale="float32" if has_units else "none",
        super_block=in_size if has_units else 0,
        act_qtype=scheme.act_qtype,
    )


def matmul(
    x: jax.Array, weights: Sequence[PackedWeight], *, act_qtype: str | None = None, activation: str | None = None
) -> list[jax.Array]:
    """Products of one x with up to four weights of the same format; x is read (and quantized) once.

    Args:
      x: float32 [..., in].
      weights: Each of [out, in].
      act_qtype: "int8" quantizes x dynamically, as in `quantized_matmul`; None does not.
      activation: "silu" or "gelu_tanh": the only result is `activation(x w0^T) * (x w1^T)`.

    Returns:
      float32 [..., out] for each.
    """
    rows = x.reshape(-1, x.shape[-1])
    sizes = [weight.shape[0] for weight in weights]
    outputs = [jax.ShapeDtypeStruct((rows.shape[0], size), jnp.float32) for size in sizes]
    results = native.call(
        "matmul",
        outputs if activation is None else outputs[:1],
        rows,
        *(weight.data for weight in weights),
        n=np.asarray(sizes, np.int64),
        quantize_activations=act_qtype is not None,
        activation=np.int32(ACTIVATIONS[activation or "none"]),
        format=weights[0].format.encode(),
    )
    return [result.reshape(*x.shape[:-1], result.shape[-1]) for result in results]


def lookup(ids: jax.Array, weight: PackedWeight) -> jax.Array:
    """Rows of a weight: ids i32 [T] -> float32 [T, in]; ids out of range are clipped."""
    output = jax.ShapeDtypeStruct((*ids.shape, weight.shape[1]), jnp.float32)
    return native.call(
        "packed_rows", output, ids, weight.data, n=np.int64(weight.shape[0]), format=weight.format.encode()
    )


def _pack(
    shape: tuple[int, ...],
    weight_format: PackedFormat,
    data: np.ndarray,
    scale: np.ndarray | None,
    allocate: Allocate | None,
) -> PackedWeight:
    return _pack_panels(shape, weight_format, 0, False, [data, scale], allocate)


def _pack_codes(
    shape: tuple[int, ...], weight_format: PackedFormat, sources: CodeSources, allocate: Allocate | None
) -> PackedWeight:
    arrays = [
        sources.data,
        sources.scale,
        sources.high,
        sources.zero_point,
        sources.minimum,
        sources.super_scale,
        sources.super_minimum,
    ]
    return _pack_panels(shape, weight_format, sources.bits, sources.data.dtype == np.int8, arrays, allocate)


def _pack_panels(
    shape: tuple[int, ...],
    weight_format: PackedFormat,
    bits: int,
    is_signed: bool,
    arrays: Sequence[np.ndarray | None],
    allocate: Allocate | None,
) -> PackedWeight:
    library = native.library()
    assert library is not None
    rows, columns = shape
    packed = _empty_panels(shape, weight_format, allocate)
    num_panels, panel_bytes = packed.shape
    # Held in a variable, so that copies by ascontiguousarray live until they are packed.
    sources = [None if a is None else np.ascontiguousarray(a) for a in arrays]
    pointers = [None if a is None else a.ctypes.data for a in sources] + [None] * (7 - len(sources))
    encoded = weight_format.encode()

    def pack_panels(first: int, last: int) -> None:
        is_packed = library.jaxis_pack(
            encoded.ctypes.data,
            encoded.size,
            rows,
            columns,
            bits,
            is_signed,
            *pointers,
            packed.ctypes.data,
            first,
            last,
        )
        assert is_packed  # a panel size implies that the kernel can pack

    for_each_part(pack_panels, num_panels, max(1, _PANELS_PER_TASK_BYTES // panel_bytes))
    return PackedWeight(packed if allocate is not None else device_array(packed), (rows, columns), weight_format)


def device_array(packed: np.ndarray) -> jax.Array:
    """Packed panels as a JAX array that shares their memory."""
    # Without may_alias, JAX would copy the data into small pages.
    return jax.device_put(packed, may_alias=True)


def _empty_panels(shape: tuple[int, ...], weight_format: PackedFormat, allocate: Allocate | None) -> np.ndarray:
    library = native.library()
    assert library is not None
    encoded = weight_format.encode()
    panel_bytes = library.jaxis_panel_bytes(encoded.ctypes.data, encoded.size, shape[1])
    if panel_bytes < 0:
        raise ValueError(f"no kernel takes weights of the format {weight_format}")
    num_panels = -(-shape[0] // PANEL_ROWS)
    return (allocate or native_memory.empty)((num_panels, panel_bytes))
