"""A family's GGUF file as one declaration: the facts that `read_config` reads and `model_keys` writes.

Settings that llama.cpp has in its own code (`src/models/*.cpp`) and not in keys are constants here. Those that differ
between models are assumptions, which the reader reports.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxis.config.hf_config import HFConfig
from jaxis.loading.gguf.config_keys import REQUIRED
from jaxis.loading.gguf.config_reader import ConfigReader, Values
from jaxis.loading.gguf.tensor_names import USUAL_NAMES, GGUFNames

FileKeys = dict[str, Any]


def head_dim(config: HFConfig) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


@dataclass(frozen=True)
class Fact:
    """One fact of a model: functions that return it as config.json has it, and as keys of the file.

    Both raise ConfigError for what jaxis, or a file, cannot express.
    """

    read: Callable[[ConfigReader], Values] = lambda _: {}
    write: Callable[[HFConfig], FileKeys] = lambda _: {}


Facts = Fact | Sequence["Facts"]


def key(name: str, key: str, default: Any = REQUIRED, kind: type = int, *, is_assumed: bool = False) -> Fact:
    """Returns the fact of a setting, by its name in config.json and its key in the file.

    Args:
      name: Name in config.json.
      key: Key in the file.
      default: Value without the key, or with 0, which turns a number off in llama.cpp. A function computes it.
        REQUIRED: none.
      kind: Type of the value: int, float or bool.
      is_assumed: True if the default is the family's value for older files; the reader reports it.
    """
    is_required = default is REQUIRED

    def read(reader: ConfigReader) -> Values:
        value = reader.keys.typed(key, kind, REQUIRED if is_required else None)
        is_off = value == 0 and kind is not bool and not is_assumed
        if is_required or not (value is None or is_off):
            return {name: value}
        found = default(reader) if callable(default) else default
        return {name: reader.keys.assume(name, found) if is_assumed else found}

    def write(config: HFConfig) -> FileKeys:
        value = config[name] if is_required else config.get(name)
        return {} if value is None else {key: value if kind is int else kind(value)}

    return Fact(read, write)


def only(key: str, *values: Any, is_written: bool = False) -> Fact:
    """Returns the fact of a key with some supported values, the first of which stands for files without it."""

    def read(reader: ConfigReader) -> Values:
        reader.keys.expect(key, *values)
        return {}

    return Fact(read, lambda _: {key: values[0]} if is_written else {})


def unused(*keys: str) -> Fact:
    """Returns the fact of keys that cannot change this family's logits."""
    return Fact(lambda reader: reader.keys.ignore(*keys) or {})


def has(name: str, *tensors: str) -> Fact:
    """Returns the fact of a switch that is on if the file has one of some tensors."""
    return Fact(lambda reader: {name: any(map(reader.keys.has_tensor, tensors))})


def constant(name: str, value: Any, *, is_assumed: bool = False) -> Fact:
    """Returns the fact of a setting that all models of the family share, and files do not have."""
    return Fact(lambda reader: {name: reader.keys.assume(name, value) if is_assumed else value})


@dataclass(frozen=True, kw_only=True)
class Written:
    """Mark of families that jaxis also writes, which llama.cpp was compared with.

    Attributes:
      biases: True if the projections can have biases in llama.cpp.
      window: True if llama.cpp applies the model's window.
      note: Says what llama.cpp computes in another way; None if nothing.
    """

    biases: bool = False
    window: bool = False
    note: Callable[[HFConfig], str | None] = lambda _: None


@dataclass(frozen=True)
class GGUF:
    """The GGUF files of a model.

    Attributes:
      model: `general.architecture`, `model_type`, and entry of `architectures`.
      facts: Facts; later ones override.
      tensors: Names of the tensors where they are not the usual ones.
      when: Key that is not 0, or a function that says if a file is of this model; of several declarations of an
        architecture, the first that holds counts.
      more_renames: Function of config.json that returns further renames, as in `GGUFNames`: of single layers.
      without: Names that config.json does not have, of those that the facts give.
      has_heads: False for models without attention.
      is_causal: False for encoders.
    """

    model: tuple[str, str, str]
    facts: Facts
    tensors: GGUFNames = USUAL_NAMES
    when: str | Callable[[ConfigReader], bool] = lambda _: True
    written: Written | None = None
    more_renames: Callable[[Values], Sequence[tuple[str, str]]] = lambda _: ()
    without: Sequence[str] = ()
    has_heads: bool = True
    is_causal: bool = True

    @functools.cached_property
    def _facts(self) -> tuple[Fact, ...]:
        return tuple(_flat(self.facts))

    @functools.cached_property
    def names(self) -> GGUFNames:
        """Returns the names of the tensors, with the renames of the model's class."""
        return self.tensors if self.tensors.renames is not None else self.tensors.of_class(self.model[2])

    def is_of(self, reader: ConfigReader) -> bool:
        return bool(reader.keys.get(self.when)) if isinstance(self.when, str) else self.when(reader)

    def read(self, reader: ConfigReader) -> Values:
        """Returns the content of config.json. Raises ConfigError as `Fact` does."""
        reader.values |= {"architectures": [self.model[2]], "model_type": self.model[1]}
        for fact in self._facts:
            reader.values |= fact.read(reader)
        return {name: value for name, value in reader.values.items() if name not in self.without}

    def write(self, config: HFConfig) -> FileKeys:
        """Returns the keys of a file. Raises ConfigError as `Fact` does."""
        return {key: value for fact in self._facts for key, value in fact.write(config).items()}


def _flat(facts: Facts) -> Iterator[Fact]:
    if isinstance(facts, Fact):
        yield facts
    else:
        for each in facts:
            yield from _flat(each)
