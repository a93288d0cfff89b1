"""Tests of many rows, of which only some run each time."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any
from zlib import crc32

import pytest


def quick_rows(rows: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All rows for `parametrize`, with those that are not quick marked as slow; a row of several values is a tuple.

    Choose such that each row's parts are tested quickly by another row, or by a test of the part alone.
    """
    rows = list(rows)
    unknown = [row for row in quick if row not in rows]
    assert not unknown, f"not among the rows: {unknown}"
    return [
        row if row in quick else pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow)
        for row in rows
    ]


def mark_rows_beyond_the_sample_as_slow(items: Iterable[pytest.Item]) -> None:
    """Keeps the first row and about one in n others of a test marked `sampled(n)` quick; of `sampled`, the first.

    Which they are depends on their names alone: a row that is added moves no other.
    """
    seen = set()
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is None or item.get_closest_marker("slow"):
            continue
        function = item.nodeid.partition("[")[0]
        is_first = function not in seen
        seen.add(function)
        if not is_first and not (marker.args and crc32(item.name.encode()) % marker.args[0] == 0):
            item.add_marker(pytest.mark.slow)
