"""HQQ's packed integers, as its HQQLinear and transformers save them in safetensors.

A weight [out, in] is cut into groups of neighbouring columns, rows of a matrix [groups of all rows, group size].
`W_q` packs that along its first axis: with 4 bits, the first half of its rows is in the high halves of the bytes,
the second in the low ones; 8, 2 and 1 bits likewise; with 3 bits, an int32 has ten, the first tenth in the highest
bits. `scale` and `zero` are floats, [groups of all rows, 1]: w = (q - zero) * scale. Further tensors hold the
quantizer's other settings, one each. Source: hqq's BitPack, Quantizer and HQQLinear.state_dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxis.kernels.weights import CodedWeight
from jaxis.kernels.weights.code_planes import code_planes
from jaxis.layers.weight_format import TensorSpec
from jaxis.quantization.formats.integer_groups import SCALE_DTYPES, check_columns

# Bits of a number -> its name in `packing`, numbers packed into one, and their type.
_PACKINGS = {
    8: ("8bit_u8", 1, np.dtype(np.uint8)),
    4: ("4bit_u8", 2, np.dtype(np.uint8)),
    3: ("3bit_32", 10, np.dtype(np.int32)),
    2: ("2bit_u8", 4, np.dtype(np.uint8)),
    1: ("1bit_u8", 8, np.dtype(np.uint8)),
}
# Numbers that must have these values for the formula of the module's docstring to hold.
_EXPECTED = {"axis": 1, "channel_wise": 1, "view_as_float": 0, "quant_scale": 0, "quant_zero": 0}
METADATA = (
    *("nbits", "group_size", "shape", "packing", "unpack_view_dtype", "compute_dtype", "offload_meta"),
    *("encoded_state_dict", "stores_quant_config", "optimize", "round_zero", *_EXPECTED),
)
"""Names of the tensors that describe a weight."""
_MAX_TEXT = 64


@dataclass(frozen=True)
class HqqFormat:
    """`W_q`, `scale` and `zero`, with the tensors that describe them: their names and shapes are `metadata`.

    `bits` of a number in `W_q` are 8, 4, 3, 2 or 1; `group_size` is the columns that share a scale.
    """

    bits: int
    group_size: int
    metadata: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def of(
        cls, shape: tuple[int, ...], dtype: np.dtype, num_groups: int, metadata: tuple[tuple[str, tuple[int, ...]], ...]
    ) -> HqqFormat | None:
        """Returns the format of a `W_q` of this shape and type; None if no packing has it."""
        for bits, (_, per_number, packed_dtype) in _PACKINGS.items():
            if dtype == packed_dtype and len(shape) == 2 and shape[0] == -(-num_groups // per_number):
                return cls(bits, shape[1], metadata)
        return None

    def tensors(self, shape: tuple[int, ...]) -> Mapping[str, TensorSpec]:
        rows, columns = shape
        check_columns(columns)
        if columns % self.group_size:
            raise ValueError(f"has {columns} features, which groups of {self.group_size} do not divide")
        num_groups = rows * columns // self.group_size
        packing, per_number, dtype = _PACKINGS[self.bits]
        samples = {name: (value,) for name, value in _EXPECTED.items()}
        samples |= {"shape": shape, "packing": tuple(map(ord, packing))}
        metadata = {name: TensorSpec(size, sample=samples.get(name)) for name, size in self.metadata}
        floats = TensorSpec((num_groups, 1), SCALE_DTYPES)
        specs = {"W_q": TensorSpec((-(-num_groups // per_number), self.group_size), (dtype,))}
        return specs | {"scale": floats, "zero": floats} | metadata

    def assemble(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> CodedWeight:
        self._check_metadata(tensors, shape)
        scale, zero = (tensors[name].reshape(shape[0], -1) for name in ("scale", "zero"))
        if not all(np.isfinite(array.astype(np.float32)).all() for array in (scale, zero)):
            raise ValueError("whose scales or zero points are not all finite")
        bits = max(self.bits, 2)
        planes = code_planes(self._numbers(tensors["W_q"])[: scale.size].reshape(shape), bits)
        return CodedWeight(planes["codes"], scale, planes.get("high"), zero, bits=bits)

    def _numbers(self, packed: np.ndarray) -> np.ndarray:
        """W_q -> uint8 [groups of all rows, group size], and padding."""
        _, per_number, _ = _PACKINGS[self.bits]
        shifts = self.bits * np.arange(per_number)[::-1]
        mask = (1 << self.bits) - 1
        parts = [((packed >> packed.dtype.type(shift)) & packed.dtype.type(mask)).astype(np.uint8) for shift in shifts]
        return np.concatenate(parts)

    def _check_metadata(self, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> None:
        """Raises ValueError if the tensors that describe the weight contradict its own."""
        for name, expected in _EXPECTED.items():
            if name in tensors and tensors[name].ravel().tolist() != [expected]:
                raise ValueError(f"whose {name} is {tensors[name].ravel()[:4].tolist()}, but must be {expected}")
        if "shape" in tensors and tensors["shape"].ravel().tolist() != list(shape):
            raise ValueError(f"whose shape is {tensors['shape'].ravel()[:4].tolist()}, but must be {list(shape)}")
        packing = _PACKINGS[self.bits][0]
        if "packing" in tensors and (stored := _text(tensors["packing"])) != packing:
            raise ValueError(f"whose packing is {stored!r}, but W_q has the shape of {packing!r}")


def _text(codes: np.ndarray) -> str:
    return "".join(chr(code) for code in codes.ravel()[:_MAX_TEXT].astype(np.uint8))
