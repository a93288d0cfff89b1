"""Compression of a program call's operands: of a vector, only the elements that changed since the last call are sent.

A step's vector holds the block tables of its requests. They are long and rarely change: a decode changes one position
and one length per request, and one table entry every `block_size` steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxis.engine.hosts.messages import Operand, Vector

HostOperand = np.ndarray | int | None


class SentOperands:
    """The leader's encoder. It remembers the last vectors of each program, as the followers have them."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], np.ndarray] = {}

    def encode(self, number: int, operands: Sequence[HostOperand]) -> list[Operand]:
        """Encodes the operands of one call.

        Args:
          number: The program's number.
          operands: Integers, None, and int32 vectors. A vector is kept by reference: the caller must not write to it
            before the next call of the same program has been encoded.
        """
        return [
            self._encode((number, index), operand) if isinstance(operand, np.ndarray) else operand
            for index, operand in enumerate(operands)
        ]

    def _encode(self, place: tuple[int, int], vector: np.ndarray) -> Vector:
        last = self._last.get(place)
        self._last[place] = vector
        if last is not None and last.shape == vector.shape:
            indices = np.flatnonzero(last != vector).astype(np.int32)
            if 2 * indices.size < vector.size:
                return Vector(vector[indices].tobytes(), indices.tobytes())
        return Vector(vector.tobytes())


class ReceivedOperands:
    """A follower's decoder of what `SentOperands` encodes."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], np.ndarray] = {}

    def decode(self, number: int, operands: Sequence[Operand]) -> list[HostOperand]:
        """Decodes the operands of one call of program `number`.

        Raises:
          ValueError: The changes of a vector do not fit the program's last vector.
        """
        return [
            self._decode((number, index), operand) if isinstance(operand, Vector) else operand
            for index, operand in enumerate(operands)
        ]

    def _decode(self, place: tuple[int, int], message: Vector) -> np.ndarray:
        values = np.frombuffer(message.values, np.int32)
        if message.changed is not None:
            indices, last = np.frombuffer(message.changed, np.int32), self._last.get(place)
            if last is None or indices.size != values.size or np.any((indices < 0) | (indices >= last.size)):
                raise ValueError(f"changes to a vector of program {place[0]} that do not go with its last one")
            # Devices may still read the last vector.
            changed, values = values, last.copy()
            values[indices] = changed
        self._last[place] = values
        return values
