"""The lines of code that compute a module."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from jaxis.bringup.verify.recording import LOGITS, Recording, module_of


def code_of(name: str, ours: Recording, theirs: Recording) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the places, "FILE:FIRST-LAST", of jaxis's code and of the reference's for a module.

    A block of torch, such as a linear layer, is right by itself: the places are those of the module around it.
    """
    name = name if name in theirs else module_of(name)
    while name not in theirs or theirs[name].is_of_torch:
        if "." not in name:
            name = LOGITS
            break
        name = name.rpartition(".")[0]
    methods = ("compute_logits", "forward") if name == LOGITS else ("__call__", "forward")
    kinds = [recording[name].computed_by if name in recording else None for recording in (ours, theirs)]
    mine, others = (() if kind is None else _places(kind, method) for kind, method in zip(kinds, methods, strict=True))
    return mine, others


def _places(kind: type, method: str) -> tuple[str, ...]:
    """Returns the place of a class's method, and of the class itself before it if it inherits the method."""
    found = [getattr(kind, method, None)] if method in vars(kind) else [kind, getattr(kind, method, None)]
    return tuple(place for each in found if each is not None for place in _place(each))


def _place(code: Any) -> tuple[str, ...]:
    try:
        file, (lines, first) = inspect.getsourcefile(inspect.unwrap(code)), inspect.getsourcelines(code)
    except (OSError, TypeError):  # made while running
        return ()
    here = Path(file or "").resolve()
    shown = here.relative_to(Path.cwd()) if here.is_relative_to(Path.cwd()) else here
    return (f"{shown}:{first}-{first + len(lines) - 1}",)
