"""Rewards of answers, and their advantages within their group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxis.training.answers import load_scorer, scores_of

MIN_DEVIATION = 1e-4


class Rewards:
    """A user's reward functions, by names such as "rewards:exact", from rewards.py; an answer's reward is their sum.

    Raises ConfigError if a function does not exist.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._functions = {name: load_scorer(name, "training.reward_functions") for name in names}

    def of(self, answered: dict[str, list[Any]]) -> dict[str, np.ndarray]:
        """Returns the rewards of each function, float64 [N], by its name.

        Raises ConfigError if a function raised an error, or did not return a finite number for each answer.
        """
        return {
            name.partition(":")[2]: np.asarray(scores_of(function, f"training.reward_functions {name!r}", answered))
            for name, function in self._functions.items()
        }


def advantages(rewards: np.ndarray, num_generations: int, scaled_by: str = "group") -> np.ndarray:
    """Computes the advantage of each answer over its group of adjacent ones: float64 [N] -> [N].

    It is divided by the standard deviation of its group, or of the whole "batch" (of a sample, plus MIN_DEVIATION, as
    in TRL), or by nothing ("none").
    """
    groups = rewards.astype(np.float64).reshape(-1, num_generations)
    found = groups - groups.mean(axis=1, keepdims=True)
    if scaled_by == "group":
        found /= groups.std(axis=1, ddof=1, keepdims=True) + MIN_DEVIATION
    elif scaled_by == "batch":
        found /= groups.std(ddof=1) + MIN_DEVIATION
    return found.reshape(-1)
