"""bitsandbytes in 4 bits: NF4, as QLoRA and Unsloth's `-bnb-4bit` are published, and FP4.

A weight [out, in] is read row by row, as one sequence of elements. `weight` has their codes, two in a byte, the earlier
in the HIGH half; the bytes may be stored in any type (`bnb_4bit_quant_storage`). `weight.absmax` has a scale for each
block of the sequence and `weight.quant_map` the value of each code. With double quantization, `weight.absmax` has codes
itself, whose values and scales are in `weight.nested_quant_map` and `weight.nested_absmax`. Everything else is JSON in
`weight.quant_state.bitsandbytes__nf4`. Source: bitsandbytes' `QuantState` and `dequantize_4bit`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxis.kernels.weights import CodedWeight
from jaxis.layers.weight_format import TensorSpec

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
      is_nested: True if the scales are quantized as well.
      storage: Type in which the codes' bytes are stored.
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
        state = {"quant_type": self.quant_type, "blocksize": self.block_size, "shape": list(shape)}
        return state | ({"nested_blocksize": _NESTED_BLOCK} if self.is_nested else {})


def _state_spec(state: Mapping[str, Any]) -> TensorSpec:
    text = json.dumps({**state, "nested_offset": 0.0}).encode()
    return TensorSpec((len(text),), (_UINT8,), sample=tuple(text), any_length=True)


def _read_state(text: np.ndarray, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON of a weight's state. Raises ValueError if it contradicts the other tensors."""
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
