"""Messages on a socket: each is its length in 8 bytes, little-endian, and then its data."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<Q")


class FrameTooLargeError(ValueError):
    """A message claims to be longer than any can be: the sender is not what it should be."""


def frame(data: bytes) -> bytes:
    """The data with its length before it."""
    return _LENGTH.pack(len(data)) + data


class FrameReader:
    """Splits what a socket receives into frames.

    Attributes:
      max_bytes: Of a frame; None for a sender that is trusted.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._buffer = bytearray()
        self.max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The data of each frame that is complete now.

        Raises:
          FrameTooLargeError: A frame is longer than `max_bytes`; nothing of it is kept.
        """
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if self.max_bytes is not None and length > self.max_bytes:
                self._buffer.clear()
                raise FrameTooLargeError(f"a message of {length} bytes; at most {self.max_bytes} are taken")
            stop = start + _LENGTH.size + length
            if len(self._buffer) < stop:
                break
            yield bytes(memoryview(self._buffer)[start + _LENGTH.size : stop])
            start = stop
        del self._buffer[:start]
