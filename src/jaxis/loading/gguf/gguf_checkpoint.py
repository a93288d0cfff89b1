from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxis.errors import CheckpointError, ConfigError
from jaxis.host.closing import Closing
from jaxis.loading.gguf.config import read_config
from jaxis.loading.gguf.model_files import GGUFModelFiles
from jaxis.loading.gguf.names import parts_of
from jaxis.loading.gguf.stored_part import Sizes, StoredPart
from jaxis.loading.gguf_block_types import FLOAT32, BlockType
from jaxis.loading.gguf_config_keys import QUANT_METHOD
from jaxis.loading.safetensors import TensorInfo

_OF_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(\w+)")
_EXPERT_STACKS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class GGUFCheckpoint(Closing):
    """The weights of a GGUF model, under the names of a Hugging Face checkpoint. A context manager; see `Checkpoint`.

    A tensor of floats is an array of them. A quantized one, [out, in], is an array uint8 [out, bytes of a row] of the
    file's blocks; `config["quantization_config"]` names their type. Any of the model's files may be given.

    Attributes:
      path: The first file.
      tensor_names: Names of the architecture's tensors.
      config: Content of the corresponding config.json.
      assumptions: Values of the config that the file does not contain, one sentence each.
      total_bytes: Bytes of all tensors together.

    Raises:
      CheckpointError: On opening, if the file is broken, or a tensor is not one of its architecture.
      ConfigError: The architecture, or a key in the file, is not supported.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._files = GGUFModelFiles(path)
        self.path = self._files.path
        try:
            config = read_config(self._files.metadata, self._files.tensors, self._floats, str(self.path))
            self.tensor_names = config.tensors
            self._parts = self._find_parts(config.sizes)
            self._small = {**config.small_tensors, **self._scales_after_blocks()}
        except (CheckpointError, ConfigError):
            self._files.close()
            raise
        self.assumptions = config.assumptions
        self.config: dict[str, Any] = config.values
        if block_types := self._block_types():
            self.config["quantization_config"] = {
                "quant_method": QUANT_METHOD,
                "block_types": block_types,
                "scaled": sorted({_stack_name(name) for name in self._scaled_modules()}),
            }
        self.total_bytes = sum(self.info(name).nbytes for name in self.names())

    def names(self) -> tuple[str, ...]:
        return (*self._parts, *self._small)

    def info(self, name: str) -> TensorInfo:
        if name in self._small:
            tensor = self._small[name]
            return TensorInfo(tensor.dtype, tensor.shape, tensor.nbytes, 0)
        pieces = self._find(name)
        stored, part = pieces[0]
        view = self._view(stored, part)
        dtype = np.dtype(np.float32) if part.has_one_added else view.dtype
        shape = part.shape_of(view)
        if len(pieces) > 1:
            shape = (sum(len(self._view(*piece)) for piece in pieces), *shape[1:])
        return TensorInfo(dtype, shape, math.prod(shape) * view.itemsize, self._files.tensors[stored].offset)

    def block_type(self, name: str) -> BlockType:
        """Returns a tensor's storage. Raises CheckpointError if there is none of that name."""
        if name in self._small:
            return FLOAT32
        return self._files.tensors[self._find(name)[0][0]].block_type

    def tensor(self, name: str) -> np.ndarray:
        """Returns a tensor, as a read-only view of the mapped file if it is there unchanged.

        Raises CheckpointError if there is none of that name.
        """
        if name in self._small:
            return self._small[name]
        arrays = [self._made(*piece) for piece in self._find(name)]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def iterate(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields every tensor once, in the files' own order; for the memory that this takes, see `Checkpoint`."""
        previous: str | None = None
        for name in self._parts:
            yield name, self.tensor(name)
            if previous is not None:
                self._release(previous)
            previous = name
        if previous is not None:
            self._release(previous)
        yield from self._small.items()

    def close(self) -> None:
        self._files.close()

    def __contains__(self, name: object) -> bool:
        return name in self._parts or name in self._small

    def _floats(self, stored: str) -> np.ndarray | None:
        """Returns a one-dimensional tensor that the config needs; None if the file does not have it."""
        return self._files.file_of(stored).tensor(stored).copy() if stored in self._files.tensors else None

    def _made(self, stored: str, part: StoredPart) -> np.ndarray:
        try:
            return part.made_of(self._files.file_of(stored).tensor(stored))
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: tensor {stored!r} {error}") from None

    def _find(self, name: str) -> list[tuple[str, StoredPart]]:
        try:
            return self._parts[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name!r} in its weights") from None

    def _view(self, stored: str, part: StoredPart) -> np.ndarray:
        return self._files.file_of(stored).tensor(stored)[(*part.index, ...)]

    def _release(self, name: str) -> None:
        for stored, part in self._parts[name]:
            self._files.file_of(stored).release(self._view(stored, part))

    def _find_parts(self, sizes: Sizes) -> dict[str, list[tuple[str, StoredPart]]]:
        """Returns Hugging Face name -> tensors in the file with its rows, mostly one, and their changes."""
        found: dict[str, list[tuple[str, StoredPart]]] = {}
        for stored, tensor in self._files.tensors.items():
            try:
                parts = parts_of(tensor, self.tensor_names, sizes)
            except CheckpointError as error:
                raise CheckpointError(f"{self.path}: {error}") from None
            for part in parts:
                pieces = found.setdefault(part.name, [])
                if same := next((other for other, piece in pieces if piece.piece == part.piece), None):
                    raise CheckpointError(
                        f"{self.path}: tensors {same!r} and {stored!r} are the same one ({part.name}): "
                        "use another file of the model"
                    )
                if pieces and self._files.tensors[pieces[0][0]].block_type != tensor.block_type:
                    raise CheckpointError(
                        f"{self.path}: tensors {pieces[0][0]!r} and {stored!r} are parts of one ({part.name}) and of "
                        "different types: use another file of the model"
                    )
                pieces.append((stored, part))
                pieces.sort(key=lambda piece: piece[1].piece)
        return found

    def _scales_after_blocks(self) -> dict[str, np.ndarray]:
        """Returns the scales of tensors whose types have them behind all blocks, by names like those of others."""
        return {
            f"{name.removesuffix('.weight')}.scale": self._files.file_of(pieces[0][0]).scale(pieces[0][0])
            for name, pieces in self._parts.items()
            if self._files.tensors[pieces[0][0]].block_type.trailer
        }

    def _scaled_modules(self) -> Iterator[str]:
        for name in self.names():
            module = name.removesuffix(".scale")
            if module != name and f"{module}.weight" in self._parts:
                yield module

    def _block_types(self) -> dict[str, str]:
        """Returns module, or stack of experts, -> type of its blocks; plain floats are left out."""
        types: dict[str, str] = {}
        for name, pieces in self._parts.items():
            block_type = self._files.tensors[pieces[0][0]].block_type
            module, _, leaf = name.rpartition(".")
            if leaf in ("k_b", "v_b"):
                types[name] = block_type.name
            elif block_type.dtype is None:
                types[_stack_name(module) if leaf == "weight" else name] = block_type.name
        return types


def _stack_name(module: str) -> str:
    """`model.layers.0.mlp.experts.3.up_proj` -> `model.layers.0.mlp.experts.up_proj`; other names stay."""
    match = _OF_EXPERT.fullmatch(module)
    return module if match is None else f"{match[1]}.{_EXPERT_STACKS.get(match[2], match[2])}"
