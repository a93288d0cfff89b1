"""What finding out whether drafts pay may cost: a small share of all time, and some of what they have gained before."""

from __future__ import annotations

# Of all time, this share may be lost.
SHARE = 0.01
# Bounds of what is left, in steps without drafts: with how much it begins, how much is kept, and how much may be owed,
# so that a step that was slow for another reason is forgiven.
FIRST_STEPS, MOST_STEPS, MOST_STEPS_OWED = 12, 50, 5


class SpareTime:
    """Seconds that may be lost.

    Attributes:
      seconds: How many are left; less than 0: some are owed.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._most: float | None = None

    def earn(self, step_seconds: float) -> None:
        """Adds the share of a step."""
        if self._most is not None:
            self.seconds = min(self.seconds + SHARE * step_seconds, self._most)

    def settle(self, saved: float, plain_seconds: float) -> None:
        """Adds what a step has saved, or takes away what it has lost.

        Args:
          saved: Less than 0 where it has lost.
          plain_seconds: What a step without drafts takes.
        """
        if self._most is None:
            self.seconds = FIRST_STEPS * plain_seconds
        self._most = MOST_STEPS * plain_seconds
        self.seconds = min(max(self.seconds + saved, -MOST_STEPS_OWED * plain_seconds), self._most)
