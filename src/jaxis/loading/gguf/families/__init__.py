"""The GGUF files of all families: each file here declares some in `GGUFS`."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from jaxis.loading.gguf.table import GGUF

_DECLARED: tuple[GGUF, ...] = tuple(
    declared
    for module in pkgutil.iter_modules(__path__)
    for declared in import_module(f"{__name__}.{module.name}").GGUFS
)

READ: Mapping[str, tuple[GGUF, ...]] = {
    architecture: tuple(declared for declared in _DECLARED if declared.model[0] == architecture)
    for architecture in dict.fromkeys(declared.model[0] for declared in _DECLARED)
}
"""Declarations by `general.architecture`, in the order in which their `when` is asked."""

WRITTEN: Mapping[str, GGUF] = {declared.model[1]: declared for declared in _DECLARED if declared.written is not None}
"""Declarations by `model_type`."""
