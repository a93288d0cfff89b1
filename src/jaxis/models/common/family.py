"""Declaration of a model family, for code that lists families without running them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxis.loading.gguf.config_reader import ConfigReader

GPT2_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""GPT-2's names of keys, for `Family.names`."""
TinySizes = Mapping[str, Any | Callable[[Mapping[str, Any]], Any]]


@dataclass(frozen=True)
class PlainGGUF:
    """GGUF files that are Llama's but for what is said here; `loading/gguf/families` has all others.

    Attributes:
      architecture: Value of `general.architecture`.
      switches: Key of config.json -> tensors, of which a file has one if the key is true.
      constants: Key of config.json -> its value in all models of the family, which files do not have.
      quirks: Functions of the family's file that read what fields cannot say, and return keys of config.json. A header
        with quirks is read with JAX, which the file imports.
      tensors: Names in the layer that are not Llama's, as `block` of `GGUFNames`.
      has_layer_norms: True for layer norms, False for RMS norms.
      permutes_rope: True if rows of queries and keys are stored so that rotated dimensions are neighbours.
      theta: Base of the rope for files that have none.
      model_type: `model_type` of config.json, of models that transformers does not have.
    """

    architecture: str
    switches: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    quirks: Sequence[Callable[[ConfigReader], Mapping[str, Any]]] = ()
    tensors: Mapping[str, str] = field(default_factory=dict[str, str])
    has_layer_norms: bool = False
    permutes_rope: bool = False
    theta: float = 10_000.0
    model_type: str = ""


@dataclass(frozen=True)
class Family:
    """A family of models: the checkpoints it runs, its row of docs/models.md, and its sizes for `jaxis verify`.

    Attributes:
      models: Names of the models, as their makers call them.
      classes: Model classes. Each is named as the entry of config.json's `architectures` that selects it.
      parts: Special features of the family: attention, states, routing, norms.
      formats: Quantized formats in which the makers publish it and which load as they are.
      gguf: GGUF files that load; a string is the `general.architecture` of one that `loading/gguf/families` declares.
      names: `model_type`, or the entry of `architectures` of files without one -> its own name of a key of config.json
        -> the usual name, which readers use.
      defaults: `model_type` -> values of keys that its config.json may lack, as in transformers. Only keys that every
        model of the type needs.
      same_code: Model type, or entry of `architectures`, whose published code is that of another in transformers -> the
        other.
      other_names: Further entries of `architectures` in published checkpoints -> the class.
      tiny: Sizes in a tiny twin's config.json that only this family has or that follow from others: key -> the size, or
        a function of the twin. A key that is null, 0, or a word such as "auto" stays as it is.
    """

    models: str
    classes: tuple[type[Any], ...]
    parts: str
    formats: tuple[str, ...] = ()
    gguf: tuple[str | PlainGGUF, ...] = ()
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    same_code: Mapping[str, str] = field(default_factory=dict[str, str])
    other_names: Mapping[str, type[Any]] = field(default_factory=dict[str, type[Any]])
    tiny: TinySizes = field(default_factory=dict[str, Any])

    @property
    def gguf_architectures(self) -> tuple[str, ...]:
        """Returns the values of `general.architecture` of the GGUF files that load."""
        return tuple(file if isinstance(file, str) else file.architecture for file in self.gguf)

    @property
    def architectures(self) -> dict[str, type[Any]]:
        """Returns every entry of `architectures` that selects one of the classes -> the class."""
        return {model_class.__name__: model_class for model_class in self.classes} | dict(self.other_names)
