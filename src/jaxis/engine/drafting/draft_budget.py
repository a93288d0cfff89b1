"""What guessing may cost, so that it never slows a text down on which it gains nothing."""

from __future__ import annotations

# Guesses may cost so much of the time, and what they have gained.
SHARE = 0.01
# So many times the length of a step may be saved up, and be owed.
MOST_SAVED, MOST_OWED = 4.0, 1.0
# Whoever was overdrawn goes on with so many: enough to find out whether guesses are right again.
ENOUGH_SAVED = 0.5


class DraftBudget:
    """An account of the seconds that guesses cost and gain. While it is overdrawn, nothing is guessed.

    Attributes:
      is_overdrawn: Whether guesses have cost more than they may.

    Args:
      least_step_seconds: Of shorter steps, guesses may cost nothing.
    """

    def __init__(self, least_step_seconds: float = 0.0) -> None:
        self.is_overdrawn = False
        self._least_step_seconds = least_step_seconds
        self._seconds: float | None = None

    def earn(self, step_seconds: float) -> None:
        """Counts a step that took so long."""
        if step_seconds < self._least_step_seconds:
            self.is_overdrawn = True
            return
        most = MOST_SAVED * step_seconds
        # To begin with, there is enough for a few failures.
        self._seconds = most if self._seconds is None else min(self._seconds + SHARE * step_seconds, most)
        if self.is_overdrawn:
            self.is_overdrawn = self._seconds < ENOUGH_SAVED * step_seconds

    def pay(self, seconds: float, step_seconds: float) -> None:
        """Counts what guesses have cost; less than 0 is a gain.

        Args:
          seconds: How much.
          step_seconds: What a step takes without guesses.
        """
        if self._seconds is not None:
            balance = self._seconds - seconds
            self._seconds = min(max(balance, -MOST_OWED * step_seconds), MOST_SAVED * step_seconds)
            self.is_overdrawn = self.is_overdrawn or self._seconds < 0
