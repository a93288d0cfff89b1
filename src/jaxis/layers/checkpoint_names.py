from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from flax import nnx

Rename = tuple[str, str]
"""(Name in checkpoints, name here): whole components of dotted names, such as ("mlp.router.gate", "mlp.gate")."""


@dataclass(frozen=True)
class CheckpointNames:
    """A family's table of renames, used in both directions. Names without a rename are the same on both sides.

    Attributes:
      renames: Renames applied to a checkpoint's names one after the other, and to names here backwards. A name that is
        already the one here must stay as it is.
      other_names: Renames applied before those, and only to a checkpoint's names: deviations of some of a family's
        files.
      transposed: Name endings of a checkpoint's tensors that are [in, out] where the parameters are [out, in].
      module_renames: Renames like `renames` from the module names of transformers, and so PEFT; None: those of
        checkpoints.
      unadaptable: Name endings of linear layers in a checkpoint that PEFT refuses to adapt, or whose weights
        transformers reads without calling them, so that an adapter would change nothing.
    """

    renames: Sequence[Rename] = ()
    other_names: Sequence[Rename] = ()
    transposed: tuple[str, ...] = ()
    module_renames: Sequence[Rename] | None = None
    unadaptable: tuple[str, ...] = ()

    def name_here(self, name_in_checkpoint: str) -> str:
        """Returns the name here of a checkpoint's module or tensor."""
        return _renamed(name_in_checkpoint, self._forwards)

    def name_in_checkpoint(self, name: str) -> str:
        return _renamed(name, self._backwards)

    def value_here(self, name_in_checkpoint: str, tensor: np.ndarray) -> np.ndarray:
        """Returns a checkpoint's tensor with the axes of the parameter."""
        return tensor.T if name_in_checkpoint.endswith(self.transposed) else tensor

    def name_of_module(self, name_in_checkpoint: str) -> str:
        """Returns the name in transformers of a checkpoint's module."""
        if self.module_renames is None:
            return name_in_checkpoint
        return _renamed(self.name_here(name_in_checkpoint), _backwards(self.module_renames))

    # Made once: a checkpoint may have tens of thousands of tensors.
    @functools.cached_property
    def _forwards(self) -> list[Rename]:
        return [(f".{old}.", f".{new}.") for old, new in (*self.other_names, *self.renames)]

    @functools.cached_property
    def _backwards(self) -> list[Rename]:
        return _backwards(self.renames)


def _backwards(renames: Sequence[Rename]) -> list[Rename]:
    return [(f".{new}.", f".{old}.") for old, new in reversed(renames)]


def _renamed(name: str, renames: Iterable[Rename]) -> str:
    """Applies renames whose names begin and end with a dot."""
    dotted = f".{name}."
    for old, new in renames:
        dotted = dotted.replace(old, new)
    return dotted[1:-1]


def checkpoint_names_of(model: nnx.Module) -> CheckpointNames:
    """Returns a model's table; an empty one for classes with the names of their checkpoints."""
    names = getattr(model, "checkpoint_names", None)
    return names if isinstance(names, CheckpointNames) else CheckpointNames()
