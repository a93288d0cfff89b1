"""A user's function that scores answers, named as `module:function`."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from jaxis.errors import ConfigError

Scorer = Callable[..., Sequence[float]]
"""(prompts, completions, completion_ids, and by name the other columns of their rows) -> a score of each, as the
reward functions of TRL."""


def load_scorer(name: str, key: str) -> Scorer:
    """Imports a function; modules of the working directory are found, too.

    Args:
      name: Such as "scores:exact", of scores.py.
      key: Which field of the configuration names it.

    Raises:
      ConfigError: There is no such function.
    """
    module_name, _, function_name = name.partition(":")
    sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except ImportError as error:
        raise ConfigError(f"{key}={name!r} cannot be imported: {error}") from None
    finally:
        sys.path.remove(os.getcwd())
    if not callable(function):
        raise ConfigError(f"{key}={name!r}: the module {module_name} has no function {function_name!r}")
    return cast(Scorer, function)


def scores_of(scorer: Scorer, name: str, answered: dict[str, list[Any]]) -> list[float]:
    """The scores of answers.

    Args:
      scorer: The function.
      name: How the configuration names it.
      answered: What it is called with, a list of equal length each.

    Raises:
      ConfigError: It raised an error, or returned something other than a finite number for each answer.
    """
    count = len(answered["completions"])
    try:
        scores = [float(score) for score in scorer(**answered)]
    except Exception as error:
        raise ConfigError(f"{name} failed: {type(error).__name__}: {error}") from error
    if len(scores) != count or not all(map(math.isfinite, scores)):
        raise ConfigError(f"{name} returned {scores[:3]}...; it must return {count} finite numbers, one an answer")
    return scores
