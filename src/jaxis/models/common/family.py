"""Declaration of a model family, for code that lists families without running them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

TinySizes = Mapping[str, Any | Callable[[Mapping[str, Any]], Any]]


@dataclass(frozen=True)
class Family:
    """A family of models: the checkpoints it runs, its row of docs/models.md, and its sizes for `jaxis verify`.

    Attributes:
      models: Names of the models, as their makers call them.
      classes: Model classes. Each is named as the entry of config.json's `architectures` that selects it.
      parts: Special features of the family: attention, states, routing, norms.
      formats: Quantized formats in which the makers publish it and which load as they are.
      gguf: Values of `general.architecture` of the GGUF files that load.
      other_names: Further entries of `architectures` in published checkpoints -> the class.
      tiny: Sizes in a tiny twin's config.json that only this family has or that follow from others: key -> the size, or
        a function of the twin. A key that is null, 0, or a word such as "auto" stays as it is.
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
        """Returns every entry of `architectures` that selects one of the classes -> the class."""
        return {model_class.__name__: model_class for model_class in self.classes} | dict(self.other_names)
