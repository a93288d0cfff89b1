"""Tests of many rows, of which only some run each time."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

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
