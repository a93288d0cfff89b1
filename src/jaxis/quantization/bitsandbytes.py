"""Checkpoints quantized by bitsandbytes.

config.json says how the model was quantized, but its list of modules that were not is often wrong: a module is
quantized if its tensors say so, and they tell everything else as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxis.kernels.weights import CodedWeight, QuantizedWeight
from jaxis.layers.weight_format import TensorSpec, WeightFormat
from jaxis.loading.safetensors import TensorInfo
from jaxis.quantization.by_tensors import FormatsByTensors

# bitsandbytes in 4 bits: NF4, as QLoRA and Unsloth's `-bnb-4bit` are published, and FP4.
#
# A weight [out, in] is read row by row, as one sequence of elements. `weight` has their codes, two in a byte, the
# earlier in the HIGH half; the bytes may be stored in any type (`bnb_4bit_quant_storage`). `weight.absmax` has a
# scale for each block of the sequence and `weight.quant_map` the value of each code. With double quantization,
# `weight.absmax` has codes itself, whose values and scales are in `weight.nested_quant_map` and
# `weight.nested_absmax`. Everything else is JSON in `weight.quant_state.bitsandbytes__nf4`. Source: bitsandbytes'
# `QuantState` and `dequantize_4bit`.


QUANT_TYPES = ("nf4", "fp4")
STATE = "weight.quant_state.bitsandbytes__"
_LEVELS = tuple(code / 8 - 1 for code in range(16))  # of an example; files have their own
_EXAMPLE_BLOCK = 64
_UINT8 = np.dtype(np.uint8)
_NESTED_BLOCK = 256


@dataclass(frozen=True)
class Bitsandbytes4BitFormat:
    """`weight`, `weight.absmax`, `weight.quant_map` and a quantization state; if nested, two more.

    Attributes:
      quant_type: "nf4" or "fp4".
      is_nested: Whether the scales are quantized as well.
      storage: The type that the codes' bytes are stored in.
      block_size: Elements that share a scale.
    """

    quant_type: str = "nf4"
    is_nested: bool = False
    storage: np.dtype = _UINT8
    block_size: int = _EXAMPLE_BLOCK

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = shape
        if columns % 2:
            raise ValueError(f"has {columns} features, an odd number, which is not supported for bitsandbytes' 4 bits")
        stored = -(-rows * columns // (2 * self.storage.itemsize))
        blocks = -(-rows * columns // self.block_size)
        float32 = (np.dtype(np.float32),)
        specs = {
            "weight": TensorSpec((stored, 1), (self.storage,), other_shapes=((1, stored), (stored,))),
            "weight.absmax": TensorSpec((blocks,), (_UINT8,) if self.is_nested else float32),
            "weight.quant_map": TensorSpec((16,), float32, sample=_LEVELS),
            f"{STATE}{self.quant_type}": _state_spec(self._state(shape)),
        }
        if self.is_nested:
            specs["weight.nested_absmax"] = TensorSpec((-(-blocks // _NESTED_BLOCK),), float32)
            specs["weight.nested_quant_map"] = TensorSpec((256,), float32)
        return specs

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> CodedWeight:
        rows, columns = shape
        stated = _read_state(tensors[f"{STATE}{self.quant_type}"], self._state(shape))
        scale = tensors["weight.absmax"]
        if self.is_nested:
            factor = np.repeat(tensors["weight.nested_absmax"], _NESTED_BLOCK)[: len(scale)]
            scale = tensors["weight.nested_quant_map"][scale] * factor + np.float32(stated["nested_offset"])
        levels = tensors["weight.quant_map"]
        if not (np.isfinite(scale).all() and np.isfinite(levels).all()):
            raise ValueError("whose scales or levels are not all finite")
        # Blocks may straddle rows: groups are the largest that neither blocks nor rows divide.
        group_size = math.gcd(self.block_size, columns)
        starts = np.arange(rows * columns // group_size) * group_size
        pairs = np.ascontiguousarray(tensors["weight"]).view(np.uint8).reshape(-1)[: rows * columns // 2]
        return CodedWeight(
            ((pairs << 4) | (pairs >> 4)).reshape(rows, columns // 2),
            scale[starts // self.block_size].reshape(rows, -1),
            levels=tuple(levels.tolist()),
        )

    def _state(self, shape: tuple[int, ...]) -> dict[str, Any]:
        """The part of the JSON that follows from the format."""
        state = {"quant_type": self.quant_type, "blocksize": self.block_size, "shape": list(shape)}
        return state | ({"nested_blocksize": _NESTED_BLOCK} if self.is_nested else {})


def _state_spec(state: Mapping[str, Any]) -> TensorSpec:
    text = json.dumps({**state, "nested_offset": 0.0}).encode()
    return TensorSpec((len(text),), (_UINT8,), sample=tuple(text), any_length=True)


def _read_state(text: np.ndarray, expected: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a weight's state. Raises ValueError if it does not match what the other tensors say."""
    try:
        state = json.loads(text.tobytes())
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise ValueError("whose quant_state is not a JSON object: download the checkpoint again")
    for key, value in expected.items():
        if state.get(key) != value:
            raise ValueError(f"whose quant_state says {key}={state.get(key)!r}, where {value!r} is expected")
    offset = state.get("nested_offset", 0.0)
    if "nested_blocksize" in expected and not (type(offset) in (int, float) and math.isfinite(offset)):
        raise ValueError(f"whose quant_state says nested_offset={offset!r}, which is not a number")
    return {"nested_offset": 0.0} | state


# bitsandbytes in 8 bits (LLM.int8()): int8 rows and the largest magnitude of each.
#
# `weight` int8 [out, in] comes with `SCB` float32 [out]: a row's elements are `q * SCB / 127`. `weight_format` tells
# the order of the elements, of which only 0, by rows, is in use. Outliers exist in activations only, which are not
# quantized here. Source: bitsandbytes' `Int8Params` and `int8_vectorwise_dequant`.


_ORDERS = ("row", "col32", "col_turing", "col_ampere")


@dataclass(frozen=True)
class Bitsandbytes8BitFormat:
    """`weight`, `SCB` and `weight_format`.

    Attributes:
      has_weight_format: Whether the file has a `weight_format`.
    """

    has_weight_format: bool = True

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        specs = {
            "weight": TensorSpec(shape, (np.dtype(np.int8),)),
            "SCB": TensorSpec((shape[0],), (np.dtype(np.float32),)),
        }
        if self.has_weight_format:
            specs["weight_format"] = TensorSpec((), (np.dtype(np.uint8), np.dtype(np.int8)), other_shapes=((1,),))
        return specs

    def assemble(self, tensors: Mapping[str, np.ndarray], _shape: tuple[int, ...]) -> QuantizedWeight:
        order = int(tensors["weight_format"].reshape(())) if self.has_weight_format else 0
        if order:
            name = _ORDERS[order] if 0 < order < len(_ORDERS) else order
            raise ValueError(f"in the order {name} of a GPU's kernels: save the model again with bitsandbytes >= 0.45")
        largest = tensors["SCB"]
        if not np.isfinite(largest).all():
            raise ValueError("whose scales are not all finite")
        return QuantizedWeight(tensors["weight"], (largest * np.float32(1 / 127))[:, None])


_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


def bitsandbytes_config(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None) -> FormatsByTensors:
    """How to load a checkpoint whose `quant_method` is "bitsandbytes".

    Args:
      config: The object in config.json.
      tensors: Headers of the checkpoint's tensors; None means that config.json must tell, from which all linear layers
        but the head are taken to be quantized.
    """
    if tensors is None:
        return FormatsByTensors(lambda module, _: None if module == "lm_head" else _format_of_config(config))
    return FormatsByTensors(lambda module, shape: _format_of(module, shape, tensors))


def is_quantized(tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether any of these tensors is quantized by bitsandbytes."""
    return any(name.endswith(".SCB") or STATE in name for name in tensors)


def _format_of_config(config: Mapping[str, Any]) -> WeightFormat:
    if config.get("load_in_8bit"):
        return Bitsandbytes8BitFormat()
    quant_type = config.get("bnb_4bit_quant_type", "fp4")
    return Bitsandbytes4BitFormat(quant_type, is_nested=bool(config.get("bnb_4bit_use_double_quant")))


def _format_of(module: str, shape: tuple[int, ...], tensors: Mapping[str, TensorInfo]) -> WeightFormat | None:
    if f"{module}.SCB" in tensors:
        return Bitsandbytes8BitFormat(has_weight_format=f"{module}.weight_format" in tensors)
    for quant_type in QUANT_TYPES:
        if f"{module}.{STATE}{quant_type}" in tensors:
            absmax, weight = tensors.get(f"{module}.weight.absmax"), tensors.get(f"{module}.weight")
            return Bitsandbytes4BitFormat(
                quant_type,
                is_nested=f"{module}.weight.nested_absmax" in tensors,
                storage=np.dtype(np.uint8) if weight is None else weight.dtype,
                block_size=_block_size(shape, 0 if absmax is None else absmax.shape[0]),
            )
    return None


def _block_size(shape: tuple[int, ...], num_blocks: int) -> int:
    """Elements that share a scale: the smallest size that makes this number of blocks of a weight [out, in]."""
    elements = shape[0] * shape[1]
    return next((size for size in _BLOCK_SIZES if -(-elements // size) == num_blocks), 64)
