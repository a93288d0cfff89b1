from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from jaxis.errors import ConfigError

Scorer = Callable[..., Sequence[float]]
"""Function of prompts, completions, completion_ids and, by name, other columns of the data rows. It returns a score of
each completion, as TRL's reward functions do."""


def load_scorer(name: str, key: str) -> Scorer:
    """Imports a function that scores answers, such as "scores:exact" from scores.py.

    Modules of the working directory are found, too. Raises ConfigError, which names the configuration's `key`, if the
    function does not exist.
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
    """Computes the scores of answers by the user's function of this name, from its arguments, lists of equal length.

    Raises ConfigError if the function raised an error, or did not return a finite number for each answer.
    """
    count = len(answered["completions"])
    try:
        scores = [float(score) for score in scorer(**answered)]
    except Exception as error:
        raise ConfigError(f"{name} failed: {type(error).__name__}: {error}") from error
    if len(scores) != count or not all(map(math.isfinite, scores)):
        raise ConfigError(f"{name} returned {scores[:3]}...; it must return {count} finite numbers, one an answer")
    return scores
