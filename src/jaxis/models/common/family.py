"""What a family's file declares about the family, for all that has to know of it without running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

TinySizes = Mapping[str, Any | Callable[[Mapping[str, Any]], Any]]


@dataclass(frozen=True)
class Family:
    """A family of models: which checkpoints it runs, its row of docs/models.md, and how `jaxis verify` shrinks it.

    Attributes:
      models: The models by name, as their makers call them.
      classes: The model classes; each is called as the entry of config.json's `architectures` that selects it.
      parts: What is special about the family: attention, states, routing, norms.
      formats: Quantized formats in which its makers publish it, and which load as they are.
      gguf: The values of `general.architecture` with which GGUF files of it load.
      other_names: Other entries of `architectures` that published checkpoints have -> the class.
      tiny: The sizes of a tiny twin's config.json that this family alone has, or that follow from others in it: key ->
        its size, or what computes it from the twin. A key that is null, 0, or a word such as "auto" stays as it is.
    """

    models: str
    classes: tuple[type[Any], ...]
    parts: str
    formats: tuple[str, ...] = ()
    gguf: tuple[str, ...] = ()
    other_names: Mapping[str, type[Any]] = field(default_factory=dict[str, type[Any]])
    tiny: TinySizes = field(default_factory=dict[str, Any])

    @property
    def architectures(self) -> dict[str, type[Any]]:
        """Every entry of `architectures` that selects one of the classes -> the class."""
        return {model_class.__name__: model_class for model_class in self.classes} | dict(self.other_names)
