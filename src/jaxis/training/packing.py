"""Which examples share a row of a batch."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Best-fit decreasing: the longest example first, each into the row with the least room that it fits into.

    How many rows there are, and how full they are, does not depend on the order of the examples.

    Args:
      lengths: Tokens of each example.
      capacity: Tokens of a row.
      order: A permutation of the examples: among equally long ones, those that come first are placed first.

    Returns:
      The examples of each row, by their indices.

    Raises:
      ValueError: An example is longer than a row.
    """
    rows: list[list[int]] = []
    of_room: dict[int, list[int]] = {}  # tokens that are free -> rows with as many
    rooms: list[int] = []  # its keys, sorted
    for index in sorted(order, key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"an example of {length} tokens does not fit into a row of {capacity}")
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room = rooms[place]
            row = of_room[room].pop()
            if not of_room[room]:
                del of_room[room], rooms[place]
        rows[row].append(index)
        left = room - length
        if left not in of_room:
            of_room[left] = []
            bisect.insort(rooms, left)
        of_room[left].append(row)
    return rows
