from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxis.errors import CheckpointError, ConfigError
from jaxis.loading.safetensors import SafetensorsFile
from jaxis.lora.expert_change import STACKS, ExpertChange, stack_and_part
from jaxis.lora.peft_config import CONFIG_FILE, AdapterConfig, read_adapter_config

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_PART = re.compile(r"\.(lora_A\.weight|lora_B\.weight|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)$")
_TOKENS = ".token_adapter.trainable_tokens_delta"
_DIGESTED_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class LowRankChange:
    """An adapter's change of one module: y = W x + scale * B (A x).

    Attributes:
      a: [r, in] for a linear layer; [r, V] for an embedding.
      b: [out, r] for a linear layer; [E, r] for an embedding.
      scale: alpha / r, or with rsLoRA alpha / sqrt(r).
      magnitude: [out], norms to which the rows of W + scale * B A are scaled (DoRA); None without DoRA.
      is_embedding: True if the module looks up rows.
      is_transposed: True if the module's weight is stored as [in, out], as embeddings and GPT-2's layers are.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitude: np.ndarray | None = None
    is_embedding: bool = False
    is_transposed: bool = False

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def weight_shape(self) -> tuple[int, int]:
        """Shape of the module's weight as it is stored."""
        if self.is_transposed:
            return self.input_size, self.output_size
        return self.output_size, self.input_size

    @property
    def input_size(self) -> int:
        return self.a.shape[1]

    @property
    def output_size(self) -> int:
        return self.b.shape[0]

    def merged(self, weight: np.ndarray) -> np.ndarray:
        """Returns the weight (of `weight_shape`) with this change, in float32."""
        product = np.float32(self.scale) * (self.b.astype(np.float32) @ self.a.astype(np.float32))
        merged = weight.astype(np.float32) + (product.T if self.is_transposed else product)
        if self.magnitude is not None:
            # DoRA's norms are those of the output features.
            axis = 0 if self.is_transposed else 1
            norms = np.linalg.norm(merged, axis=axis, keepdims=True)
            magnitude = self.magnitude.astype(np.float32)
            merged *= np.expand_dims(magnitude, axis) / norms
        return merged


@dataclass(frozen=True)
class TokenRows:
    """Rows [tokens, E] of an embedding table that an adapter replaces, with their token ids."""

    ids: Sequence[int]
    rows: np.ndarray

    def put_into(self, table: np.ndarray) -> np.ndarray:
        """Returns a table [V, E] with these rows replaced."""
        changed = np.array(table)
        changed[list(self.ids)] = self.rows.astype(table.dtype)
        return changed


@dataclass(frozen=True)
class Adapter:
    """A PEFT adapter: its two files, checked against each other.

    Attributes:
      digest: SHA-256 of the files' content; equal digests mean equal outputs.
      changes: Change of each module, by the module's name in the base checkpoint.
      replaced: Replacement of each whole weight or bias, by tensor name.
      tokens: Replaced rows of embedding tables, by module name.
      experts: Change of each stacked parameter of experts, by parameter name.
    """

    path: Path
    config: AdapterConfig
    digest: bytes
    changes: Mapping[str, LowRankChange]
    replaced: Mapping[str, np.ndarray]
    tokens: Mapping[str, TokenRows]
    experts: Mapping[str, ExpertChange]

    @property
    def max_rank(self) -> int:
        of_experts = (change.a.shape[1] for change in self.experts.values())
        return max(*(change.rank for change in self.changes.values()), *of_experts, 0, 0)

    @property
    def extra_targets(self) -> list[str]:
        """Names that the engine's `lora_target_modules` needs for this adapter: of embeddings, heads and experts."""
        found = {stack.split(".")[-2] for stack in self.experts}
        for name, change in self.changes.items():
            if (part := stack_and_part(f"{name}.weight")) is not None:
                found.add(part[0].split(".")[-2])
            elif change.is_embedding or not any(part.isdigit() for part in name.split(".")):
                found.add(name.rpartition(".")[2])
        return sorted(found)


def read_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Reads an adapter from a folder. Its arrays are views of the mapped file.

    Raises CheckpointError if a file is missing or damaged, or its tensors, which the error names, do not match the
    config, and ConfigError if the config has an unsupported setting.
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
        tensors = _Tensors(file, config)
        tensors.read()
    found = tensors.changes, tensors.replaced, tensors.tokens, tensors.experts
    return Adapter(folder, config, digest_of(folder), *found)


class _Tensors:
    """Sorts the tensors of a file into attributes of `Adapter`. Names and shapes are checked before data is read."""

    def __init__(self, file: SafetensorsFile, config: AdapterConfig) -> None:
        self._file = file
        self._config = config
        self.changes: dict[str, LowRankChange] = {}
        self.replaced: dict[str, np.ndarray] = {}
        self.tokens: dict[str, TokenRows] = {}
        self.experts: dict[str, ExpertChange] = {}

    def read(self) -> None:
        parts: dict[str, dict[str, str]] = {}
        for name in self._file.names:
            self._take(name, parts)
        if not parts and not self.replaced and not self.tokens:
            raise CheckpointError(f"{self._file.path} has no tensors: the adapter was not saved whole")
        for module, names in parts.items():
            if (stack := self._stack(module, has_inner=f"{module}.base_layer" in parts)) is None:
                self.changes[module] = self._change(module, names)
            else:
                self.experts[stack] = self._expert_change(module, stack, names)

    def _take(self, name: str, parts: dict[str, dict[str, str]]) -> None:
        """Reads a whole tensor, or records a part of a module's change in `parts`: module -> kind -> tensor name."""
        if self._file.info(name).dtype not in _FLOATS:
            raise self._fault(name, f"is {self._file.info(name).dtype}, expected float32, bfloat16 or float16")
        if not name.startswith(_PREFIX):
            raise self._fault(name, f"does not begin with {_PREFIX!r}, as PEFT's do")
        module = name.removeprefix(_PREFIX)
        if match := _PART.search(module):
            parts.setdefault(module[: match.start()], {})[match[1]] = name
        elif module.endswith(_TOKENS):
            self.tokens[module.removesuffix(_TOKENS)] = self._token_rows(name, module.removesuffix(_TOKENS))
        elif ".lora_" in module:
            raise self._fault(name, "is of a kind that is not supported")
        elif self._is_replaced(module):
            self.replaced[module.replace(".base_layer.", ".")] = self._tensor(name)
        else:
            raise self._fault(name, f"belongs to none of the modules that {CONFIG_FILE} names")

    def _stack(self, module: str, *, has_inner: bool) -> str | None:
        """Returns the stacked parameter of experts that a module's tensors change; None if they change a module."""
        experts = module.removesuffix(".base_layer")
        if not experts.endswith("experts") or self._config.changes(module):
            return None
        named = [stack for stack in STACKS if self._config.changes_parameter(f"{experts}.{stack}")]
        if len(named) > 1:
            named = named[:1] if experts != module else named[1:] if has_inner else []
        return f"{experts}.{named[0]}" if named else None

    def _expert_change(self, module: str, stack: str, names: Mapping[str, str]) -> ExpertChange:
        kinds = ("lora_A.weight", "lora_B.weight")
        self._check_parts(module, names, kinds)
        rank, (a, b) = self._config.rank_of(stack), (self._file.info(names[kind]).shape for kind in kinds)
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] % rank or not all((*a, *b)):
            raise self._fault(
                names[kinds[0]], f"has shape {list(a)}, and lora_B {list(b)}: expected rank {rank} of each"
            )
        stacks = [self._tensor(names[kind]) for kind in kinds]
        return ExpertChange.of(
            stacks[0], stacks[1], rank, self._config.scale_of(stack), has_inputs_first=self._config.has_inputs_first
        )

    def _token_rows(self, name: str, module: str) -> TokenRows:
        ids, shape = self._config.tokens_of(module), self._file.info(name).shape
        if len(shape) != 2 or shape[0] != len(ids):
            raise self._fault(name, f"has shape {list(shape)}, but {CONFIG_FILE} names {len(ids)} tokens for it")
        return TokenRows(ids, self._tensor(name))

    def _is_replaced(self, name: str) -> bool:
        """Returns whether the config says that the adapter replaces this tensor."""
        module, _, kind = name.rpartition(".")
        if self._config.ensures_tying and kind == "weight" and not any(part.isdigit() for part in name.split(".")):
            return True  # the table that is tied to one that the config names
        whole = self._config.replaces(module)
        if module.endswith(".base_layer") and (kind == "weight" or self._config.bias == "none"):
            # PEFT saves adapted embeddings and heads together with their base weights.
            return kind in ("weight", "bias") and self._config.changes(module.removesuffix(".base_layer"))
        if whole or kind != "bias":
            return whole
        if self._config.bias == "lora_only":
            return self._config.changes(module.removesuffix(".base_layer"))
        return self._config.bias == "all"

    def _change(self, module: str, names: Mapping[str, str]) -> LowRankChange:
        is_embedding = any("embedding" in part for part in names)
        kinds = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A.weight", "lora_B.weight")
        dora = ("lora_magnitude_vector",) if self._config.use_dora else ()
        self._check_parts(module, names, (*kinds, *dora))
        name = module
        if not self._config.changes(module):
            name = f"{module}.weight"
            is_tied = self._config.ensures_tying and not any(part.isdigit() for part in module.split("."))
            if not is_tied and not self._config.changes_parameter(name):
                raise self._fault(names[kinds[0]], f"is of a module that {CONFIG_FILE} does not name")
        rank, sizes = self._config.rank_of(name), [self._file.info(names[kind]).shape for kind in kinds]
        shape_a, shape_b = sizes
        if len(shape_a) != 2 or shape_a[0] != rank:
            raise self._fault(names[kinds[0]], f"has shape {list(shape_a)}, expected [{rank}, ...]: its rank")
        if len(shape_b) != 2 or shape_b[1] != rank:
            raise self._fault(names[kinds[1]], f"has shape {list(shape_b)}, expected [..., {rank}]: its rank")
        a, b = (self._tensor(names[kind]) for kind in kinds)
        magnitude = None
        if dora:
            magnitude = self._tensor(names[dora[0]])
            if math.prod(magnitude.shape) != shape_b[0]:
                raise self._fault(names[dora[0]], f"has shape {list(magnitude.shape)}, expected [{shape_b[0]}]")
            magnitude = magnitude.reshape(-1)
        is_transposed = is_embedding or self._config.is_transposed
        return LowRankChange(a, b, self._config.scale_of(name), magnitude, is_embedding, is_transposed)

    def _check_parts(self, module: str, names: Mapping[str, str], expected: Sequence[str]) -> None:
        for part in expected:
            if part not in names:
                raise CheckpointError(
                    f"{self._file.path} has no tensor {f'{_PREFIX}{module}.{part}'!r}: the adapter was not saved whole"
                )
        for part, name in names.items():
            if part not in expected:
                raise self._fault(name, f"is not expected by {CONFIG_FILE}")

    def _tensor(self, name: str) -> np.ndarray:
        tensor = self._file.tensor(name)
        if not np.isfinite(tensor).all():
            raise self._fault(name, "has NaN or infinite elements: its training diverged, or the file is damaged")
        return tensor

    def _fault(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path}: tensor {name!r} {what}")


def digest_of(folder: Path) -> bytes:
    """Returns the SHA-256 of an adapter's two files."""
    digest = hashlib.sha256()
    for path in (folder / CONFIG_FILE, folder / WEIGHTS_FILE):
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while piece := file.read(_DIGESTED_PIECE_BYTES):
                digest.update(piece)
    return digest.digest()


def not_in_model(adapter: Adapter, name: str) -> ConfigError:
    """Makes the error for a module or tensor that the base model does not have."""
    return ConfigError(
        f"{adapter.path} changes {name!r}, which the model's checkpoint does not have as floats: it was trained on "
        "another model, or the checkpoint has this fused, tied or quantized"
    )
