"""Vectors of program calls, as what has changed since the last call of the same program.

A step's vector has the block tables of its requests, which are long and hardly change: a decode changes a position and
a length for each request, and an entry of its table every `block_size` steps.
"""

from __future__ import annotations

import numpy as np

from jaxis.engine.hosts.messages import Vector


class SentVectors:
    """What the followers have of each program's last vector; the leader's side."""

    def __init__(self) -> None:
        self._last: dict[int, np.ndarray] = {}

    def encode(self, number: int, vector: np.ndarray) -> Vector:
        """What to send for a vector.

        Args:
          number: Of the program that is called with it.
          vector: int32 [N]; it is kept, and must not be written to before the next one of the program was encoded.
        """
        last = self._last.get(number)
        self._last[number] = vector
        if last is not None and last.shape == vector.shape:
            indices = np.flatnonzero(last != vector).astype(np.int32)
            if 2 * indices.size < vector.size:
                return Vector(vector[indices].tobytes(), indices.tobytes())
        return Vector(vector.tobytes())


class ReceivedVectors:
    """Rebuilds what `SentVectors` encodes; a follower's side."""

    def __init__(self) -> None:
        self._last: dict[int, np.ndarray] = {}

    def decode(self, number: int, message: Vector) -> np.ndarray:
        """The vector, int32 [N], that is called with program `number`.

        Raises:
          ValueError: It does not go with the last one.
        """
        values = np.frombuffer(message.values, np.int32)
        if message.changed is not None:
            indices, last = np.frombuffer(message.changed, np.int32), self._last.get(number)
            if last is None or indices.size != values.size or np.any((indices < 0) | (indices >= last.size)):
                raise ValueError(f"changes to a vector of program {number} that do not go with its last one")
            # The last one may still be read by devices.
            changed, values = values, last.copy()
            values[indices] = changed
        self._last[number] = values
        return values
