"""A GGUF model's tensors as floats, under the names and in the layout that transformers writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxis.bringup.convert.expert_stacks import join_gate_up
from jaxis.errors import CheckpointError
from jaxis.kernels.weights import dequantize
from jaxis.loading.gguf.gguf_checkpoint import GGUFCheckpoint
from jaxis.loading.safetensors_writer import TensorHeader
from jaxis.quantization.formats.gguf import GGUFFormat, LatentHeadsFormat

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)")
_LATENT_PARTS = (".kv_b_proj.k_b", ".kv_b_proj.v_b")
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class _Tensor:
    header: TensorHeader
    make: Callable[[], np.ndarray]


class DequantizedTensors:
    """The tensors of a GGUF model, made one at a time.

    `dtype` is the type of all of them. None loses nothing: float32 for blocks, else the file's type, and bfloat16 for
    float32 vectors of a bfloat16 model that have no more digits. `dequantized_bytes` counts the tensors that are made
    of blocks: their bytes in the file, and as floats.
    """

    def __init__(self, checkpoint: GGUFCheckpoint, dtype: np.dtype | None = None) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype
        self._order = checkpoint.tensor_names.stack
        self._is_bfloat16 = checkpoint.config["dtype"] == "bfloat16" and not self._has_blocks()
        self.num_dequantized, self.dequantized_bytes = 0, (0, 0)
        self._tensors = dict(self._plan())
        self.total_bytes = sum(tensor.header.nbytes for tensor in self._tensors.values())

    def names(self) -> Sequence[str]:
        return tuple(self._tensors)

    def info(self, name: str) -> TensorHeader:
        return self._tensors[name].header

    def tensor(self, name: str) -> np.ndarray:
        """Returns a tensor. Raises CheckpointError if a value is too large for float16."""
        tensor = self._tensors[name]
        made = np.ascontiguousarray(tensor.make()).reshape(tensor.header.shape)  # numbers without an axis get one
        with np.errstate(over="ignore"):
            converted = made.astype(tensor.header.dtype, copy=False)
        if converted.dtype == np.float16 and np.isinf(converted).any():
            raise CheckpointError(f"{name} has values that float16 cannot hold: choose --dtype bfloat16 or float32")
        return converted

    @property
    def widest(self) -> str:
        """The type of the matrices, or float32 if they differ."""
        matrices = (tensor.header for tensor in self._tensors.values() if len(tensor.header.shape) > 1)
        dtypes = {header.dtype for header in matrices if header.dtype.kind != "i"}
        return next(iter(dtypes)).name if len(dtypes) == 1 else _FLOAT32.name

    def _has_blocks(self) -> bool:
        return any(self._checkpoint.block_type(name).dtype is None for name in self._checkpoint.names())

    def _plan(self) -> list[tuple[str, _Tensor]]:
        planned: list[tuple[str, _Tensor]] = []
        for name in self._checkpoint.names():
            if name.endswith(".scale") and f"{name.removesuffix('.scale')}.weight" in self._checkpoint:
                continue  # part of a weight of blocks
            self._count(name)
            if name.endswith(_LATENT_PARTS):
                if name.endswith("k_b"):
                    planned.append(self._latents(name.removesuffix(".k_b")))
            elif self._order is not None and (match := _EXPERT.fullmatch(name)):
                if match[2] == "0" and match[3] != "up_proj":
                    planned.append(self._stack(match[1], match[3], match[4]))
            else:
                planned.append((name, self._single(name)))
        return planned

    def _count(self, name: str) -> None:
        if self._checkpoint.block_type(name).dtype is None:
            self.num_dequantized += 1
            stored, floats = self.dequantized_bytes
            elements = np.prod(self._shape(name), dtype=np.int64)
            itemsize = (self._dtype or _FLOAT32).itemsize
            self.dequantized_bytes = (stored + self._checkpoint.info(name).nbytes, floats + int(elements) * itemsize)

    def _single(self, name: str) -> _Tensor:
        dtype = self._dtype_of(name)
        if dtype == _FLOAT32 and self._dtype is None and self._is_bfloat16 and _fits_bfloat16(self._floats(name)):
            dtype = _BFLOAT16
        return _Tensor(TensorHeader(dtype, self._shape(name)), lambda: self._floats(name))

    def _dtype_of(self, name: str) -> np.dtype:
        stored = self._checkpoint.info(name).dtype
        if stored.kind == "i":  # a table of numbers
            return stored
        if self._dtype is not None:
            return self._dtype
        return _FLOAT32 if self._checkpoint.block_type(name).dtype is None else stored

    def _shape(self, name: str) -> tuple[int, ...]:
        shape, block_type = self._checkpoint.info(name).shape, self._checkpoint.block_type(name)
        if block_type.dtype is not None:
            return shape
        return (*shape[:-1], shape[-1] // block_type.nbytes * block_type.elements)

    def _floats(self, name: str) -> np.ndarray:
        block_type = self._checkpoint.block_type(name)
        stored = self._checkpoint.tensor(name)
        if block_type.dtype is not None:
            return stored
        scale_name = f"{name.removesuffix('.weight')}.scale"
        has_scale = scale_name in self._checkpoint
        tensors = {"weight": stored} | ({"scale": self._checkpoint.tensor(scale_name)} if has_scale else {})
        return np.asarray(
            dequantize(GGUFFormat(block_type, has_scale).assemble(tensors, self._shape(name))), np.float32
        )

    def _latents(self, module: str) -> tuple[str, _Tensor]:
        """The projection of latents to keys and values, which the file has in two parts."""
        parts = {part: f"{module}.{part}" for part in ("k_b", "v_b")}
        heads, latent, key_dim = self._shape(parts["k_b"])
        value_dim = self._shape(parts["v_b"])[1]
        key_type, value_type = (self._checkpoint.block_type(name) for name in parts.values())
        layout = LatentHeadsFormat(key_type, value_type, heads, key_dim)
        shape = (heads * (key_dim + value_dim), latent)

        def make() -> np.ndarray:
            return layout.assemble({part: self._checkpoint.tensor(name) for part, name in parts.items()}, shape)

        return f"{module}.weight", _Tensor(TensorHeader(self._dtype_of(parts["k_b"]), shape), make)

    def _stack(self, experts: str, projection: str, suffix: str) -> tuple[str, _Tensor]:
        """All experts' projections in one tensor, gate and up joined."""
        order = self._order
        assert order is not None
        count = 0
        while f"{experts}.{count}.{projection}.{suffix}" in self._checkpoint:
            count += 1

        def members(which: str) -> list[np.ndarray]:
            return [self._floats(f"{experts}.{i}.{which}.{suffix}").swapaxes(-1, 0) for i in range(count)]

        def turned(stack: np.ndarray) -> np.ndarray:
            return stack.swapaxes(-1, -2) if order.outputs_first else stack

        def make() -> np.ndarray:
            if projection == "down_proj":
                return turned(np.stack(members("down_proj")))
            return turned(join_gate_up(members("gate_proj"), members("up_proj"), interleaved=order.interleaved))

        first = f"{experts}.0.{projection}.{suffix}"
        size_out, *sizes_in = self._shape(first)
        size_out *= 1 if projection == "down_proj" else 2
        shape = (count, size_out, *sizes_in) if order.outputs_first else (count, *sizes_in, size_out)
        name = experts.removesuffix("experts") + (order.down if projection == "down_proj" else order.gate_up)
        return name + ("_bias" if suffix == "bias" else ""), _Tensor(TensorHeader(self._dtype_of(first), shape), make)


def _fits_bfloat16(tensor: np.ndarray) -> bool:
    return not (np.ascontiguousarray(tensor).view(np.uint32) & 0xFFFF).any()
