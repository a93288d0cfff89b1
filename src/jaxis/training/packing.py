from __future__ import annotations

import bisect
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Packs by best-fit decreasing: the longest example first, each into the fullest batch row that it fits into.

    Returns the indices of the examples of each batch row of `capacity` tokens. The number of batch rows and their
    lengths do not depend on `order`, a permutation that decides among equally long examples. Raises ValueError if an
    example is longer than a batch row.
    """
    rows: list[list[int]] = []
    of_room: dict[int, list[int]] = {}  # number of free tokens -> batch rows
    rooms: list[int] = []  # keys of of_room, sorted
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
