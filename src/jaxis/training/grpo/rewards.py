"""Rewards of answers, and their advantages over the others of their group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxis.training.scorer import load_scorer, scores_of

MIN_DEVIATION = 1e-4


class Rewards:
    """A user's reward functions; an answer's reward is the sum of theirs.

    Args:
      names: Such as "rewards:exact", of rewards.py.

    Raises:
      ConfigError: There is no such function.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._functions = {name: load_scorer(name, "training.reward_functions") for name in names}

    def of(self, answered: dict[str, list[Any]]) -> dict[str, np.ndarray]:
        """Name of each function -> float64 [N], its rewards.

        Raises:
          ConfigError: One raised an error, or returned something other than a number for each answer.
        """
        return {
            name.partition(":")[2]: np.asarray(scores_of(function, f"training.reward_functions {name!r}", answered))
            for name, function in self._functions.items()
        }


def advantages(rewards: np.ndarray, num_generations: int, *, scaled: bool) -> np.ndarray:
    """How much better each answer is than its group: float64 [N] -> [N].

    Args:
      rewards: Of all answers, those of a group next to each other.
      num_generations: Answers of a group.
      scaled: Whether they are divided by the group's standard deviation (of a sample, plus MIN_DEVIATION, as in TRL).
    """
    groups = rewards.astype(np.float64).reshape(-1, num_generations)
    found = groups - groups.mean(axis=1, keepdims=True)
    if scaled:
        found /= groups.std(axis=1, ddof=1, keepdims=True) + MIN_DEVIATION
    return found.reshape(-1)
