"""Numbers in words, as runs."""

from __future__ import annotations

from collections.abc import Iterable


def number_ranges(numbers: Iterable[int]) -> str:
    """Writes ascending numbers as "0-4,6-10,12"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
