"""torchao's tensor classes in safetensors files: integers and floats with scales for blocks of a weight.

A parameter `weight` of one of these classes is stored as tensors `_weight_qdata`, `_weight_scale` and others. The class
and its attributes are JSON in the file's metadata, which `quantization/torchao.py` reads. Quantization of a layer's
input, which the attributes may ask for, is not done here, which is never less accurate.
Source: torchao's `torchao.prototype.safetensors` and the `dequantize` of each class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxis.kernels.weights import BlockScaledWeight, CodedWeight, QuantizedWeight
from jaxis.kernels.weights.block_scaled_weight import scale_shape
from jaxis.kernels.weights.code_planes import code_planes
from jaxis.layers.weight_format import TensorSpec
from jaxis.quantization.formats.finite import check_finite
from jaxis.quantization.formats.mlx import E2M1_LEVELS

_INT8, _UINT8, _FLOAT32 = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.float32)
_E4M3, _E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)
_FLOATS = (_FLOAT32, np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_STORED_BITS = {1: 2, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 8, 8: 8}
"""Bits of an integer -> bits of a code in memory."""


@dataclass(frozen=True)
class TorchaoIntegersFormat:
    """`Int8Tensor` and `IntxUnpackedToInt8Tensor`: `_weight_qdata` int8 [out, in], with a scale for each block.

    Elements are `(qdata - zero_point) * scale`, of `bits` bits, sign-extended in the file. A block, (rows, columns), is
    one row, or all of them. There may be `_weight_zero_point`.
    """

    block_shape: tuple[int, int]
    bits: int = 8
    has_zero_point: bool = True

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        blocks = scale_shape(shape, self.block_shape)
        if shape[1] % self.block_shape[1] or blocks[0] not in (1, shape[0]):
            raise ValueError(f"of shape {list(shape)} has blocks of {list(self.block_shape)}, which is not supported")
        specs = {
            "_weight_qdata": TensorSpec(shape, (_INT8,)),
            "_weight_scale": TensorSpec(blocks, _FLOATS),
        }
        if self.has_zero_point:
            specs["_weight_zero_point"] = TensorSpec(blocks, (_INT8,))
        return specs

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> QuantizedWeight | CodedWeight:
        groups = (shape[0], tensors["_weight_scale"].shape[1])
        scale = np.broadcast_to(tensors["_weight_scale"], groups)
        _check_finite_scales(scale)
        q, zero_point = tensors["_weight_qdata"], tensors.get("_weight_zero_point")
        offset = 1 << (self.bits - 1)
        if self.bits < 8 and q.size and not -offset <= q.min() <= q.max() < offset:
            raise ValueError(f"with elements outside of {self.bits} bits")
        points = None if zero_point is None or not zero_point.any() else np.broadcast_to(zero_point, groups)
        if self.bits == 8 and points is None:
            return QuantizedWeight(q, scale.astype(np.float32) if groups[1] == 1 else scale)
        bits = _STORED_BITS[self.bits]
        planes = code_planes(q.view(np.uint8) + np.uint8(offset), bits)
        return CodedWeight(planes["codes"], scale, planes.get("high"), zero_point=points, bits=bits, offset=offset)


@dataclass(frozen=True)
class TorchaoInt4Format:
    """`Int4Tensor`: `_weight_qdata` [out, in / 2], two signed elements a byte, the earlier in the low half.

    Elements are `qdata * scale + zero_point`, where the last two are [in / group, out], for groups of a row.
    """

    group_size: int

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        if shape[1] % self.group_size:
            raise ValueError(f"has {shape[1]} features, which groups of {self.group_size} do not divide")
        groups = TensorSpec((shape[1] // self.group_size, shape[0]), _FLOATS)
        return {
            "_weight_qdata": TensorSpec((shape[0], shape[1] // 2), (_INT8, _UINT8)),
            "_weight_scale": groups,
            "_weight_zero_point": groups,
        }

    def assemble(self, tensors: Mapping[str, np.ndarray], _shape: tuple[int, ...]) -> CodedWeight:
        scale, minimum = tensors["_weight_scale"].T, tensors["_weight_zero_point"].T
        _check_finite_scales(scale, minimum)
        # Flipping the sign bits adds 8 to each element.
        codes = tensors["_weight_qdata"].view(np.uint8) ^ np.uint8(0x88)
        return CodedWeight(codes, np.ascontiguousarray(scale), minimum=np.ascontiguousarray(minimum), offset=8)


@dataclass(frozen=True)
class TorchaoFloat8Format:
    """`Float8Tensor` of e4m3: `_weight_qdata` [out, in], with a scale for each block (rows, columns), a factor."""

    block_shape: tuple[int, int]

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        blocks = scale_shape(shape, self.block_shape)
        return {
            "_weight_qdata": TensorSpec(shape, (_E4M3,)),
            "_weight_scale": TensorSpec(blocks, _FLOATS, other_shapes=((),) if blocks == (1, 1) else ()),
        }

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> BlockScaledWeight:
        scale = tensors["_weight_scale"].reshape(scale_shape(shape, self.block_shape))
        weight = BlockScaledWeight(tensors["_weight_qdata"], scale, self.block_shape)
        check_finite(weight)
        return weight


@dataclass(frozen=True)
class TorchaoMicroscalingFormat:
    """`MXTensor` and `NVFP4Tensor`: e4m3 or e2m1 elements, with a scale for each group of a row.

    e2m1 elements are uint8 [out, in / 2], the earlier in the low half.

    Attributes:
      is_fp4: True if elements are e2m1, not e4m3.
      is_nvidia: True if scales are e4m3 for 16 elements, as in NVFP4; otherwise they are e8m0 for 32.
      is_swizzled: True if scales are in the order in which GPUs read them; see `_unswizzle`.
      has_tensor_scale: True if there is a `_weight_per_tensor_scale` float32 [], which multiplies the scales.
    """

    is_fp4: bool
    is_nvidia: bool = False
    is_swizzled: bool = False
    has_tensor_scale: bool = False

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = shape
        if columns % self._group_size:
            raise ValueError(f"has {columns} features, which groups of {self._group_size} do not divide")
        groups = columns // self._group_size
        scale = (-(-rows // 128) * 32, -(-groups // 4) * 16) if self.is_swizzled else (rows, groups)
        elements = TensorSpec((rows, columns // 2), (_UINT8,)) if self.is_fp4 else TensorSpec(shape, (_E4M3,))
        scales = TensorSpec(scale, (_E4M3,) if self.is_nvidia else (_E8M0, _UINT8))
        specs = {"_weight_qdata": elements, "_weight_scale": scales}
        if self.has_tensor_scale:
            specs["_weight_per_tensor_scale"] = TensorSpec((), (_FLOAT32,), other_shapes=((1,), (1, 1)))
        return specs

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> BlockScaledWeight | CodedWeight:
        elements, scale = tensors["_weight_qdata"], tensors["_weight_scale"]
        scale = scale.view(_E4M3 if self.is_nvidia else _E8M0)
        if self.is_swizzled:
            scale = _unswizzle(scale, shape[0], shape[1] // self._group_size)
        if not self.is_nvidia:
            weight = BlockScaledWeight(elements, scale, (1, self._group_size))
            check_finite(weight)
            return weight
        factor = None
        if self.has_tensor_scale:
            factor = np.full((shape[0], 1), tensors["_weight_per_tensor_scale"].reshape(()), np.float32)
            _check_finite_scales(factor)
        _check_finite_scales(scale)
        return CodedWeight(elements, scale, super_scale=factor, levels=E2M1_LEVELS)

    @property
    def _group_size(self) -> int:
        return 16 if self.is_nvidia else 32


def _whole(block_shape: tuple[int, int], shape: tuple[int, ...]) -> tuple[int, int]:
    return block_shape[0] or shape[0], block_shape[1] or shape[1]


def _check_finite_scales(*arrays: np.ndarray) -> None:
    if not all(np.isfinite(array.astype(np.float32)).all() for array in arrays):
        raise ValueError("whose scales are not all finite")


def _unswizzle(scale: np.ndarray, rows: int, groups: int) -> np.ndarray:
    """Scales in the order of NVIDIA's block-scaled products -> [rows, groups].

    There, tiles of 128 rows and 4 groups, padded at the edges, follow each other; row r of a tile is at (r % 32, r //
    32).
    """
    tiles = scale.reshape(-(-rows // 128), -(-groups // 4), 32, 4, 4)
    ordered = tiles.transpose(0, 3, 2, 1, 4).reshape(tiles.shape[0] * 128, -1)
    return np.ascontiguousarray(ordered[:rows, :groups])
