"""Until when something is waited for."""

from __future__ import annotations

import time


class Deadline:
    """A time that may be put off while there is progress, and brought forward by whoever does not wait any longer.

    Any thread may call its methods.

    Attributes:
      is_cancelled: Whether what was waited for is not wanted any more.

    Args:
      seconds: From now.
    """

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds
        self._is_over = self.is_cancelled = False

    @property
    def left(self) -> float:
        """Seconds that are left; 0: it is over."""
        return 0.0 if self._is_over else max(0.0, self._at - time.monotonic())

    def put_off(self, seconds: float) -> None:
        """Makes it at least so many seconds from now, unless it is over."""
        if self.left:
            self._at = max(self._at, time.monotonic() + seconds)

    def end(self) -> None:
        """Makes it now, for good."""
        self._is_over = True

    def cancel(self) -> None:
        """As `end`, and notes that nobody wants what was waited for."""
        self.is_cancelled = True
        self.end()
