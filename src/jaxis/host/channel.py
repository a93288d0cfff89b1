"""Messages between processes: MessagePack of fixed types, no pickle, each after its length, on a stream socket.

A frame is the length of its data in 8 bytes, little-endian, and the data. The server and its engine, the hosts of a
group, and engines that hand over blocks all speak in such frames; each has types of its own.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

Message = TypeVar("Message")

RECEIVE_BYTES = 1 << 18
_LENGTH = struct.Struct("<Q")
# A machine that has gone without a word (no power, no network) is noticed by the system after about 15 seconds.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 15_000}


class FrameTooLargeError(ValueError):
    """A message claims to be longer than any valid one: its sender is not trusted."""


class ChannelClosedError(ConnectionError):
    """The other side has ended, cannot be reached, or does not speak this protocol."""


def _encode_array(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Encodes an array for MessagePack as its type, shape and bytes."""
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} in a message")
    return value.dtype.str, value.shape, value.tobytes()


def decode_array(kind: type, value: Any) -> np.ndarray:
    """Decodes an array; the `dec_hook` of decoders for messages with arrays."""
    if kind is not np.ndarray:
        raise NotImplementedError(f"{kind.__name__} in a message")
    dtype, shape, data = value
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def to_frame(message: msgspec.Struct) -> bytes:
    """Encodes a message with its length before it."""
    data = encode(message)
    return _LENGTH.pack(len(data)) + data


class MessageReader(Generic[Message]):
    """Splits received bytes into messages of the decoder's types.

    `max_bytes` limits a message; None is for a trusted sender.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[Message], max_bytes: int | None = None) -> None:
        self._decoder, self._buffer = decoder, bytearray()
        self.max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yields each message that is complete now.

        Raises FrameTooLargeError if a message is longer than `max_bytes`, and keeps nothing of it; msgspec.DecodeError
        if data is no message of these types.
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
            yield self._decoder.decode(bytes(memoryview(self._buffer)[start + _LENGTH.size : stop]))
            start = stop
        del self._buffer[:start]


class Channel(Generic[Message]):
    """Sends and receives whole messages, in order, with TLS or without. Several threads may send, one receives.

    A received message has one of the decoder's types, and at most `max_bytes`.
    """

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[Message], max_bytes: int) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection = connection
        self._reader, self._received = MessageReader(decoder, max_bytes), deque[Message]()
        self._lock = threading.Lock()

    def send(self, message: msgspec.Struct, timeout_seconds: float | None = None) -> None:
        """Sends a message within `timeout_seconds`, for channels of one thread; None is any time.

        Raises TimeoutError if it took longer, and then the channel is of no more use; ChannelClosedError if the other
        side has ended.
        """
        self.send_data(to_frame(message), timeout_seconds)

    def send_data(self, data: bytes, timeout_seconds: float | None = None) -> None:
        """Sends a frame, as `send` does a message."""
        try:
            with self._lock:
                if timeout_seconds is not None:
                    self._connection.settimeout(timeout_seconds)
                self._connection.sendall(data)
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosedError(str(error)) from None

    def receive(self, timeout_seconds: float | None = None) -> Message:
        """Returns the next message; `timeout_seconds` of None waits for any time.

        Raises TimeoutError if no whole message arrived in time, and keeps received parts for the next call;
        ChannelClosedError if no more messages will come.
        """
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        try:
            while not self._received:
                if end is not None:
                    if (left := end - time.monotonic()) <= 0:
                        raise TimeoutError("timed out")
                    self._connection.settimeout(left)
                data = self._connection.recv(RECEIVE_BYTES)
                if not data:
                    raise ChannelClosedError("the connection was closed")
                self._received.extend(self._reader.feed(data))
        except (TimeoutError, ChannelClosedError):
            raise
        except (OSError, FrameTooLargeError) as error:
            raise ChannelClosedError(str(error)) from None
        except ValueError as error:  # msgspec's errors are ValueErrors
            raise ChannelClosedError(f"a message of another protocol ({error})") from None
        finally:
            if end is not None:
                with contextlib.suppress(OSError):  # it was closed
                    self._connection.settimeout(None)
        return self._received.popleft()

    def admit(self, max_bytes: int) -> None:
        """Allows received messages of up to so many bytes from now on: the other side is trusted."""
        self._reader.max_bytes = max_bytes

    def finish(self) -> None:
        """Ends sending; messages that were sent before still arrive."""
        with contextlib.suppress(OSError):  # it was closed
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Ends the connection: a receiver on either side wakes up."""
        with contextlib.suppress(OSError):  # it was closed
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
