"""The keys of a GGUF file that describe its model, read so that none can be overlooked.

Source: llama.cpp's `gguf-py/gguf/constants.py` and `src/llama-model.cpp`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxis.errors import ConfigError
from jaxis.loading.gguf.container import GGUFTensor, shortest_float

# Keys of an architecture that cannot change a model's logits. The number of rows of the embeddings is `vocab_size`.
NEUTRAL_KEYS = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"})
# Keys that change nothing at one value, besides 0.
_NEUTRAL_VALUES = {"expert_weights_scale": 1.0}
_STRINGS = frozenset({"rope.scaling.type", "projector_type", "vision.projector_type"})
REQUIRED: Any = object()
"""Default of a key that a file must have."""
_EXPECTED = {int: "an integer of at least 0", float: "a number", bool: "true or false"}


class Keys:
    """The keys below `{architecture}.`, each marked as read when it is read.

    Attributes:
      architecture: `general.architecture`.
      metadata: All keys of the file, also those of no architecture.
      assumptions: Sentences about assumed values, as in `GGUFCheckpoint`.
    """

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], source: str) -> None:
        self.architecture: str = metadata["general.architecture"]
        self.metadata = metadata
        self.tensors = tensors
        self.source = source
        self.assumptions: list[str] = []
        prefix = f"{self.architecture}."
        self._values = {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a key's value, or the default; one number where an array has the same for every layer.

        Raises ConfigError if the layers differ, or the value is a string where a number is expected.
        """
        value = self._stored(key)
        if isinstance(value, str) and key not in _STRINGS:
            raise ConfigError(f"{self.source} has {self.architecture}.{key} = {value!r}, expected a number")
        return default if value is None else value

    def _stored(self, key: str) -> Any:
        self._read.add(key)
        value = self._values.get(key)
        if isinstance(value, np.ndarray):
            if len({*value.tolist()}) != 1:
                raise ConfigError(
                    f"{self.source} has {self.architecture}.{key} = {value.tolist()}: layers that differ in it are "
                    "not supported"
                )
            value = value.tolist()[0]
        return shortest_float(value) if isinstance(value, float) else value

    def typed(self, key: str, kind: type, default: Any = REQUIRED) -> Any:
        """Returns a value of a type: int (from 0 on), float or bool; the default if it is absent.

        Raises ConfigError if the value has another type, or is absent without a default.
        """
        value = self._stored(key)
        if value is None:
            return self._default(key, default)
        if not (type(value) is kind or (kind is float and type(value) is int)) or (kind is int and value < 0):
            raise ConfigError(f"{self.source} has {self.architecture}.{key} = {value!r}, expected {_EXPECTED[kind]}")
        return kind(value)

    def _default(self, key: str, default: Any) -> Any:
        if default is REQUIRED:
            raise ConfigError(f"{self.source} lacks the key {self.architecture}.{key}: use another file of the model")
        return default

    def integer(self, key: str, default: Any = REQUIRED) -> int:
        """Returns an integer from 0 on, as `typed` does."""
        return self.typed(key, int, default)

    def assume(self, name: str, value: Any) -> Any:
        """Returns the family's value for a key that the file does not have, and reports it."""
        self.assumptions.append(f"{name}={value}")
        return value

    def get_or_assume(self, key: str, name: str, default: Any) -> Any:
        """Returns a key's value, or the family's, reported as an assumption about config.json's `name`."""
        value = self.get(key)
        return self.assume(name, default) if value is None else value

    def for_layers(self, key: str, num_layers: int) -> list[Any] | None:
        """Returns a key's value for each layer; None if it is absent or one number for all.

        Raises ConfigError if there are fewer values than layers.
        """
        self._read.add(key)
        value = self._values.get(key)
        if not isinstance(value, np.ndarray):
            return None
        if len(value) < num_layers:
            raise ConfigError(f"{self.source} has {len(value)} values of {self.architecture}.{key}, not {num_layers}")
        return value.tolist()[:num_layers]

    def array(self, key: str, default: Any = REQUIRED) -> list[Any]:
        """Returns the elements of a key's array; the default if there is none. Raises ConfigError without a default."""
        self._read.add(key)
        value = self._values.get(key)
        return value.tolist() if isinstance(value, np.ndarray) else self._default(key, default)

    def ignore(self, *keys: str) -> None:
        """Marks keys of the file as read; for those that have no effect on the logits of this architecture."""
        self._read.update(keys)

    def expect(self, key: str, *expected: Any) -> None:
        """Reads a key with only one supported value, or none. Raises ConfigError if it has another value."""
        value = self.get(key, expected[0])
        if value not in expected:
            wanted = " or ".join(map(str, expected))
            raise ConfigError(
                f"{self.source} has {self.architecture}.{key} = {value!r}, of which only {wanted} is supported"
            )

    def has_tensor(self, name: str) -> bool:
        """Returns whether the model, or one of its layers, has a tensor of this name."""
        return name in self.tensors or f"blk.0.{name}" in self.tensors or name in self._names_in_layers

    @functools.cached_property
    def _names_in_layers(self) -> frozenset[str]:
        return frozenset(name.split(".", 2)[-1] for name in self.tensors if name.startswith("blk."))

    def check_all_read(self) -> None:
        """Raises ConfigError if a key was not read that could change the model's logits."""
        unread = [
            f"{self.architecture}.{key}"
            for key, value in self._values.items()
            if key not in self._read and not _is_neutral(key, value)
        ]
        if unread:
            raise ConfigError(
                f"{self.source} has keys that jaxis does not know: {', '.join(sorted(unread))}. They may change the "
                "model: use a file without them, or the original checkpoint"
            )


def _is_neutral(key: str, value: Any) -> bool:
    """Returns whether the key cannot change logits, or is 0 or false: in llama.cpp, these turn a key off."""
    if key in NEUTRAL_KEYS:
        return True
    return not isinstance(value, np.ndarray | list | str) and value in (0, _NEUTRAL_VALUES.get(key))
