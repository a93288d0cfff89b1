"""A PEFT adapter: its two files, checked against each other."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxis.errors import CheckpointError, ConfigError
from jaxis.loading.safetensors import SafetensorsFile
from jaxis.lora.peft_config import CONFIG_FILE, AdapterConfig, read_adapter_config

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_PART = re.compile(r"\.(lora_A\.weight|lora_B\.weight|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)$")
_DIGESTED_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class LowRankChange:
    """What an adapter adds to one module: y = W x + scale * B (A x).

    Attributes:
      a: [r, in] of a linear layer; [r, V] of an embedding.
      b: [out, r]; [E, r] of an embedding.
      scale: alpha / r, or with rsLoRA alpha / sqrt(r).
      magnitude: [out], the norms to which the rows of W + scale * B A are scaled (DoRA); None if they are not.
      is_embedding: Whether the module looks up rows.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitude: np.ndarray | None = None
    is_embedding: bool = False

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The shape of the module's weight: [out, in], or [V, E] of an embedding."""
        shape = (self.b.shape[0], self.a.shape[1])
        return (shape[1], shape[0]) if self.is_embedding else shape

    def merged(self, weight: np.ndarray) -> np.ndarray:
        """weight, of `weight_shape`, with this change: in float32."""
        product = np.float32(self.scale) * (self.b.astype(np.float32) @ self.a.astype(np.float32))
        merged = weight.astype(np.float32) + (product.T if self.is_embedding else product)
        if self.magnitude is not None:
            # DoRA's norms are those of the output features: of an embedding, its columns.
            axis = 0 if self.is_embedding else 1
            norms = np.linalg.norm(merged, axis=axis, keepdims=True)
            magnitude = self.magnitude.astype(np.float32)
            merged *= np.expand_dims(magnitude, axis) / norms
        return merged


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter.

    Attributes:
      path: Its folder.
      config: What its config says.
      digest: SHA-256 of its files' bytes: equal digests mean equal outputs.
      changes: Module -> what is added to it. Names are those of the checkpoint that it was trained on.
      replaced: Tensor -> what it is instead: whole weights, and biases.
    """

    path: Path
    config: AdapterConfig
    digest: bytes
    changes: Mapping[str, LowRankChange]
    replaced: Mapping[str, np.ndarray]

    @property
    def max_rank(self) -> int:
        """The largest rank of a module."""
        return max((change.rank for change in self.changes.values()), default=0)


def read_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Reads an adapter. Its arrays are views of the mapped file.

    Args:
      path: A folder with adapter_config.json and adapter_model.safetensors.

    Raises:
      CheckpointError: A file is missing or damaged, or has other tensors than the config says; the error names them.
      ConfigError: The config has what is not supported.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{path} is not a folder: give the folder of an adapter that PEFT saved")
    config = read_adapter_config(folder)
    weights = folder / WEIGHTS_FILE
    if not weights.exists():
        pickled = folder / "adapter_model.bin"
        hint = (
            f"{pickled.name} is a pickle, which can run code when it is read: save the adapter with safetensors"
            if pickled.exists()
            else "give the folder of an adapter that PEFT saved"
        )
        raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}: {hint}")
    with SafetensorsFile(weights) as file:
        changes, replaced = _Tensors(file, config).read()
    return Adapter(folder, config, digest_of(folder), changes, replaced)


class _Tensors:
    """Sorts the tensors of a file; looks at names and shapes before it touches the data."""

    def __init__(self, file: SafetensorsFile, config: AdapterConfig) -> None:
        self._file = file
        self._config = config

    def read(self) -> tuple[dict[str, LowRankChange], dict[str, np.ndarray]]:
        parts: dict[str, dict[str, str]] = {}
        replaced: dict[str, np.ndarray] = {}
        for name in self._file.names:
            if self._file.info(name).dtype not in _FLOATS:
                raise self._fault(name, f"is {self._file.info(name).dtype}, expected float32, bfloat16 or float16")
            if not name.startswith(_PREFIX):
                raise self._fault(name, f"does not begin with {_PREFIX!r}, as PEFT's do")
            module = name.removeprefix(_PREFIX)
            if match := _PART.search(module):
                parts.setdefault(module[: match.start()], {})[match[1]] = name
            elif ".lora_" in module:
                raise self._fault(name, "is of a kind that is not supported")
            elif self._is_replaced(module):
                replaced[module.replace(".base_layer.", ".")] = self._file.tensor(name)
            else:
                raise self._fault(name, f"belongs to none of the modules that {CONFIG_FILE} names")
        if not parts and not replaced:
            raise CheckpointError(f"{self._file.path} has no tensors: the adapter was not saved whole")
        return {module: self._change(module, names) for module, names in parts.items()}, replaced

    def _is_replaced(self, name: str) -> bool:
        """Whether the config says that the adapter has this tensor whole."""
        module, _, kind = name.rpartition(".")
        whole = self._config.replaces(module)
        if module.endswith(".base_layer") and kind == "weight":
            # PEFT saves embeddings and heads that it changes with what they were changed from.
            return self._config.changes(module.removesuffix(".base_layer"))
        if whole or kind != "bias":
            return whole
        if self._config.bias == "lora_only":
            return self._config.changes(module.removesuffix(".base_layer"))
        return self._config.bias == "all"

    def _change(self, module: str, names: Mapping[str, str]) -> LowRankChange:
        is_embedding = any("embedding" in part for part in names)
        kinds = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A.weight", "lora_B.weight")
        dora = ("lora_magnitude_vector",) if self._config.use_dora else ()
        for part in (*kinds, *dora):
            if part not in names:
                raise CheckpointError(
                    f"{self._file.path} has no tensor {_PREFIX}{module}.{part}: the adapter was not saved whole"
                )
        for part, name in names.items():
            if part not in (*kinds, *dora):
                raise self._fault(name, f"is not expected by {CONFIG_FILE}")
        if not self._config.changes(module):
            raise self._fault(names[kinds[0]], f"is of a module that {CONFIG_FILE} does not name")
        rank, sizes = self._config.rank_of(module), [self._file.info(names[kind]).shape for kind in kinds]
        shape_a, shape_b = sizes
        if len(shape_a) != 2 or shape_a[0] != rank:
            raise self._fault(names[kinds[0]], f"has shape {list(shape_a)}, expected [{rank}, ...]: its rank")
        if len(shape_b) != 2 or shape_b[1] != rank:
            raise self._fault(names[kinds[1]], f"has shape {list(shape_b)}, expected [..., {rank}]: its rank")
        a, b = (self._file.tensor(names[kind]) for kind in kinds)
        magnitude = None
        if dora:
            magnitude = self._file.tensor(names[dora[0]])
            if math.prod(magnitude.shape) != shape_b[0]:
                raise self._fault(names[dora[0]], f"has shape {list(magnitude.shape)}, expected [{shape_b[0]}]")
            magnitude = magnitude.reshape(-1)
        return LowRankChange(a, b, self._config.scale_of(module), magnitude, is_embedding)

    def _fault(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path}: tensor {name!r} {what}")


def digest_of(folder: Path) -> bytes:
    """SHA-256 of an adapter's two files."""
    digest = hashlib.sha256()
    for path in (folder / CONFIG_FILE, folder / WEIGHTS_FILE):
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while piece := file.read(_DIGESTED_PIECE_BYTES):
                digest.update(piece)
    return digest.digest()


def not_in_model(adapter: Adapter, name: str) -> ConfigError:
    """The error for a module or tensor that the base model does not have."""
    return ConfigError(
        f"{adapter.path} changes {name!r}, which the model's checkpoint does not have as floats: it was trained on "
        "another model, or the checkpoint has this fused, tied or quantized"
    )
