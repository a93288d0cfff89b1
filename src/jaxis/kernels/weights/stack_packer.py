from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable

import ml_dtypes
import numpy as np

from jaxis.kernels import huge_pages
from jaxis.kernels.native_constants import CODE_UNIT, PANEL_ROWS
from jaxis.kernels.weights.packed_format import PackedFormat
from jaxis.kernels.weights.packed_weight import PackedWeight, device_array, pack
from jaxis.kernels.weights.weight import Allocate

_FLOATS = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
"""Types of scales other than 8-bit codes."""


class StackPacker:
    """Packer of the weights of X experts for the native kernels on CPU, each straight into its place in one stack.

    Experts may be packed in any order, and in several threads at a time.
    """

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._lock = threading.Lock()
        self._data: np.ndarray | None = None
        self._packed: dict[int, PackedWeight] = {}
        self._formats: set[PackedFormat] = set()

    @property
    def experts(self) -> Iterable[int]:
        return self._packed.keys()

    def pack(self, expert: int, pack: Callable[[Allocate], PackedWeight]) -> None:
        """Packs one expert's weight; `pack` gets an allocator for its memory.

        Raises ValueError if the format is not an earlier one's; the message continues a sentence that begins with the
        weight's name.
        """
        packed = pack(lambda shape: self._place(expert, shape))
        with self._lock:
            if not all(_fit(packed.format, other) for other in self._formats):
                raise ValueError("has a different type from those of the other experts")
            self._formats.add(packed.format)
            self._packed[expert] = packed

    def stack(self) -> PackedWeight:
        """Returns the stack once every expert is packed: uint8 [X, panels, panel's bytes] as a JAX array."""
        assert self._data is not None
        assert len(self._packed) == self._num_experts
        # The scales of one expert may be 8-bit codes by chance, and those of another not: then all become floats.
        shared = next(one for one in self._formats if not any(_can_have_floats(one, other) for other in self._formats))
        data = self._data
        if len(self._formats) > 1:
            experts = [self._packed[expert] for expert in range(self._num_experts)]
            data = np.stack([e.data if e.format == shared else _with_float_scales(e, shared) for e in experts])
        return dataclasses.replace(self._packed[0], data=device_array(data), format=shared)

    def _place(self, expert: int, shape: tuple[int, int]) -> np.ndarray:
        with self._lock:
            if self._data is None:
                self._data = huge_pages.empty_pages((self._num_experts, *shape))
        return self._data[expert] if self._data.shape[1:] == shape else np.empty(shape, np.uint8)


def pack_stack(weights: np.ndarray) -> PackedWeight:
    """Packs a stack [X, out, in] of floats: bfloat16 stays bfloat16, every other type becomes float32."""
    stack = StackPacker(len(weights))
    for index, matrix in enumerate(weights):
        rows = np.ascontiguousarray(matrix)
        stack.pack(index, lambda allocate, rows=rows: pack(rows, allocate))
    return stack.stack()


def _fit(one: PackedFormat, other: PackedFormat) -> bool:
    return one == other or _can_have_floats(one, other) or _can_have_floats(other, one)


def _can_have_floats(coded: PackedFormat, other: PackedFormat) -> bool:
    """Returns whether weights with 8-bit codes as scales have another format once the scales become floats."""
    has_codes = coded.scale == "uint8" and coded.super_block == coded.in_size
    with_floats = dataclasses.replace(
        coded, scale=other.scale, minimum=other.minimum, super_scale="none", super_block=0
    )
    return (
        has_codes
        and {other.scale, other.minimum} - {"none"} <= _FLOATS.keys()
        and other == with_floats
        and (other.minimum == "none") == (coded.minimum == "none")
    )


def _with_float_scales(weight: PackedWeight, target: PackedFormat) -> np.ndarray:
    """Returns the panels of the same elements in a format that `_can_have_floats` accepts."""
    coded, data = weight.format, np.asarray(weight.data)
    span = max(coded.group_size, CODE_UNIT)
    codes_per_span = span // coded.group_size * PANEL_ROWS
    kinds: list[tuple[np.dtype, np.dtype]] = [(np.dtype(np.uint8), _FLOATS[target.scale])]
    if coded.minimum != "none":
        kinds.append((np.dtype(np.int8), _FLOATS[target.minimum]))
    head = len(kinds) * PANEL_ROWS * 4
    units = data[..., :head].copy().view(np.float32).reshape(*data.shape[:-1], len(kinds), 1, 1, PANEL_ROWS)
    spans = data[..., head:].reshape(*data.shape[:-1], coded.in_size // span, -1)
    parts = []
    for index, (code, dtype) in enumerate(kinds):
        codes = spans[..., index * codes_per_span : (index + 1) * codes_per_span].view(code)
        products = (codes.reshape(*codes.shape[:-1], -1, PANEL_ROWS) * units[..., index, :, :, :]).astype(dtype)
        parts.append(products.reshape(*codes.shape).view(np.uint8))
    parts.append(spans[..., len(kinds) * codes_per_span :])
    return np.concatenate(parts, axis=-1).reshape(*data.shape[:-1], -1)
